"""The output head in a checkpoint: whether there is one, and whether it is the table of embeddings."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.gguf_file import is_gguf
from jengine.base.model_files import malformed
from jengine.checkpoints.converted import is_converted
from jengine.checkpoints.files import found_tensors
from jengine.checkpoints.hugging_face import model_config
from jengine.checkpoints.in_memory import Tensors
from jengine.checkpoints.quantized_formats import read_fields
from jengine.checkpoints.stored import StoredTensor, Tensor
from jengine.core.speculation import NAME
from jengine.models import DRAFT_HEADS
from jengine.models.config import ModelConfig
from jengine.models.draft_heads import ARCHITECTURES

OUTPUT_HEADS = ("lm_head.weight", "embed_out.weight")
BLOCK = 1 << 22  # numbers that are compared at a time
_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)\.(?!bias$)\w+")
_EMBEDDINGS = re.compile(r"(?:.*\.)?(?:embed_tokens|embed_in|word_embeddings|wte)\.weight")
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")  # fields of config.json
# of its format, without effect on what the head computes
OF_SPECULATORS = (
    "speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config",
    "has_no_defaults_at_init", "embed_requires_grad",
)  # fmt: skip


def has_output_head(path: Path, config: ModelConfig, tensors: Tensors | None = None) -> bool:
    """Whether a folder has an output head, which turns hidden states into logits."""
    return (
        config.tie_embeddings
        or is_converted(path)
        or is_gguf(path)
        or not found_tensors(path, tensors).keys().isdisjoint(OUTPUT_HEADS)
    )


def untied_head(tensors: Tensors) -> str | None:
    """The name of an output head that differs from the embeddings; None: they have the same values, or there
    is none. Some fine-tunes have one although their configuration says that it is tied.
    """
    tables = [tensor for name, tensor in tensors.items() if _EMBEDDINGS.fullmatch(name)]
    heads = [name for name in tensors if _HEAD.fullmatch(name)]
    if not tables or not heads:
        return None
    same = any(_equal(tensors[heads[0]], table) for table in tables)
    return None if same else heads[0]


def _equal(tensor: Tensor, other: Tensor) -> bool:
    a, b = tensor.array, other.array
    if a is b:
        return True
    if isinstance(a, StoredTensor) or isinstance(b, StoredTensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    flat, others = np.asarray(a).reshape(-1), np.asarray(b).reshape(-1)
    # bits, since numbers of bfloat16 are compared slowly
    bits = f"u{flat.dtype.itemsize}"
    starts = range(0, flat.size, BLOCK)
    return all(
        np.array_equal(flat[start : start + BLOCK].view(bits), others[start : start + BLOCK].view(bits))
        for start in starts
    )


def mtp_config(folder: Path, model: ModelConfig) -> ModelConfig:
    """The configuration of the head in a model's checkpoint.

    Raises:
        InvalidArgument: there is none, or it cannot be read; says why.
    """
    name = f"{model.family}_mtp"
    if is_gguf(folder) or is_converted(folder):
        why = "heads are read from checkpoints in Hugging Face's layout alone"
    elif name not in DRAFT_HEADS:
        have = ", ".join(head.removesuffix("_mtp") for head in DRAFT_HEADS if head.endswith("_mtp"))
        why = f"model_type {model.family} has no such head; {have} do"
    else:
        fields = read_fields(folder)
        with malformed(folder / "config.json"):
            text = {**fields, **(fields.get("text_config") or {})}
        field = next((field for field in COUNTS if text.get(field) == 0), None)
        if field is None:
            return model_config({**fields, "model_type": name}, folder / "config.json", draft_head=True)
        why = f"the checkpoint has no such head: {field}=0"
    raise InvalidArgument(f"{NAME}.method", "mtp", why)


def eagle3_config(folder: Path) -> ModelConfig:
    """The configuration of a head in a separate folder, in the format of its authors or of speculators;
    `draft_heads.of_model` completes it.

    Raises:
        ModelError: the folder has none, or it is not supported.
    """
    file = folder / "config.json"
    if is_gguf(folder):
        raise ModelError("a head is read from a folder in Hugging Face's layout", file=folder)
    fields = read_fields(folder)
    with malformed(file):
        named = [str(name) for name in fields.get("architectures") or ()]
        if fields.get("speculators_model_type", "eagle3") != "eagle3" or not {*named} & {*ARCHITECTURES}:
            what = fields.get("speculators_model_type") or ", ".join(named) or "no architectures"
            raise ModelError(f"is no EAGLE-3 head but {what}; {', '.join(ARCHITECTURES)} are")
        if "speculators_model_type" in fields:  # its default is the other one
            of_head = {name: value for name, value in fields.items() if name not in OF_SPECULATORS}
            fields = {"norm_before_residual": True, **of_head, **fields["transformer_layer_config"]}
    return model_config({**fields, "model_type": "eagle3"}, file, draft_head=True)
