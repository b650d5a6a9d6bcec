"""The output head in a checkpoint: whether there is one, and whether it is the table of embeddings."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from jengine.base.errors import ModelError
from jengine.base.gguf_file import is_gguf
from jengine.checkpoints.converted import is_converted
from jengine.checkpoints.files import found_tensors
from jengine.checkpoints.in_memory import Tensors
from jengine.checkpoints.stored import StoredTensor, Tensor
from jengine.models.config import ModelConfig

OUTPUT_HEADS = ("lm_head.weight", "embed_out.weight")
BLOCK = 1 << 22  # numbers that are compared at a time
_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)\.(?!bias$)\w+")
_EMBEDDINGS = re.compile(r"(?:.*\.)?(?:embed_tokens|embed_in|word_embeddings|wte)\.weight")


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


def check_tied(tensors: Tensors) -> None:
    """
    Raises:
        ModelError: there is an output head that differs from the embeddings.
    """
    if (name := untied_head(tensors)) is not None:
        reason = "differs from the embeddings, which the model uses as its output head"
        raise ModelError(reason, file=tensors[name].file, tensor=name)


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
