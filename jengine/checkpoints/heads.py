"""Configurations of heads that draft: in the checkpoint of their model (MTP), or in a folder of their own
(EAGLE-3).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.gguf_file import is_gguf
from jengine.base.model_files import malformed, read_object
from jengine.checkpoints.converted import is_converted
from jengine.checkpoints.hugging_face import model_config
from jengine.core.speculation import NAME
from jengine.models import DRAFT_HEADS
from jengine.models.config import ModelConfig
from jengine.models.eagle3 import ARCHITECTURES
from jengine.models.mtp import Ahead

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")  # fields of config.json
# of its format, without effect on what the head computes
OF_SPECULATORS = (
    "speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config",
    "has_no_defaults_at_init", "embed_requires_grad",
)  # fmt: skip


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
        fields = read_object(folder / "config.json")
        with malformed(folder / "config.json"):
            text = {**fields, **(fields.get("text_config") or {})}
        field = next((field for field in COUNTS if text.get(field) == 0), None)
        if field is None:
            return model_config({**fields, "model_type": name}, folder / "config.json", draft_head=True)
        why = f"the checkpoint has no such head: {field}=0"
    raise InvalidArgument(f"{NAME}.method", "mtp", why)


def mtp_prefix(head: ModelConfig) -> str:
    """The prefix of the names of its tensors."""
    module: Any = DRAFT_HEADS[head.family].module
    prefix: str = module.names(head.part(Ahead).layers).head
    return prefix


def eagle3_config(folder: Path) -> ModelConfig:
    """The configuration of a head in a folder of its own, in the format of its authors or of speculators;
    `eagle3.of_model` completes it.

    Raises:
        ModelError: the folder has none, or it is not supported.
    """
    file = folder / "config.json"
    if is_gguf(folder):
        raise ModelError("a head is read from a folder in Hugging Face's layout", file=folder)
    fields = read_object(file)
    with malformed(file):
        named = [str(name) for name in fields.get("architectures") or ()]
        if fields.get("speculators_model_type", "eagle3") != "eagle3" or not {*named} & {*ARCHITECTURES}:
            what = fields.get("speculators_model_type") or ", ".join(named) or "no architectures"
            raise ModelError(f"is no EAGLE-3 head but {what}; {', '.join(ARCHITECTURES)} are")
        if "speculators_model_type" in fields:  # its default is the other one
            of_head = {name: value for name, value in fields.items() if name not in OF_SPECULATORS}
            fields = {"norm_before_residual": True, **of_head, **fields["transformer_layer_config"]}
    return model_config({**fields, "model_type": "eagle3"}, file, draft_head=True)
