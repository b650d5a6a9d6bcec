"""The abstract parameters of quantized matrices: as an option rounds them, or as a checkpoint stores them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax

from jengine.base.errors import InvalidArgument, ModelError
from jengine.core.quantization import ModelFormats
from jengine.models.config import StoredWeights
from jengine.models.pieces import Piece
from pallas_kernels.products.weights import NUMBERS, abstract
from pallas_kernels.quantization.formats import WeightFormat
from pallas_kernels.quantization.hadamard import block_of


def format_of(stored: StoredWeights) -> WeightFormat:
    """The format of a checkpoint's quantized matrices.

    Raises:
        ModelError: products do not take it.
    """
    weight = NUMBERS.get(stored.form)
    if weight is None:
        raise ModelError(f"form={stored.form!r} of stored weights must be one of {', '.join(NUMBERS)}")
    inputs = None if not stored.inputs else stored.form if weight.bits == 8 else "int8"
    return WeightFormat(stored.form, weight.bits, stored.group, stored.offset, inputs)


def rounded(
    plain: jax.ShapeDtypeStruct,
    axes: tuple[str | None, ...],
    formats: ModelFormats,
    *,
    parts: int,
    group_size: int,
    calibrated: bool,
) -> Any:
    """A matrix or table as an option quantizes it.

    Args:
        parts: into which devices divide the inputs.
        group_size, calibrated: of int4, as in `build`.
    """
    weight = formats.matrices
    if axes[0] == "vocab":
        weight = formats.vocabulary
    elif formats.sensitive is not None and _loses_much(axes):
        weight = formats.sensitive
    # with a Hadamard transform: outliers would otherwise leave few of the eight bits to other activations; of
    # weights alone, it gains little without calibration
    transformed = weight.inputs == "int8"
    if weight.numbers == "int4":
        weight, transformed = dataclasses.replace(weight, group=group_size), transformed or calibrated
    hadamard = block_of(plain.shape[-1] // parts) if transformed else 1
    return abstract(plain, weight, parts=parts, hadamard=hadamard)


def as_stored(plain: jax.ShapeDtypeStruct, stored: StoredWeights, source: Sequence[Piece], parts: int) -> Any:
    """A matrix in the checkpoint's form, or plain if the checkpoint does not store all of it in that form, or
    if devices or pieces of the checkpoint would cut groups of eight-bit numbers.

    Raises:
        InvalidArgument, ModelError: devices or the matrix's size cut groups of fewer bits.
    """
    modules = {piece.name.rpartition(".")[0] for piece in source}
    if any(re.match(pattern, module) for module in modules for pattern in stored.others):
        return plain
    weight, size = format_of(stored), plain.shape[-1]
    if weight.group and weight.bits == 8:
        if any(end % weight.group for end in (size // parts, *_cuts(plain, source))):
            return plain
    elif weight.group and size % weight.group:
        reason = f"groups of {weight.group} inputs do not divide the {size} of {source[0].name}"
        raise ModelError(f"quantization_config: {reason}", file="config.json")
    elif weight.group and size // parts % weight.group:
        raise InvalidArgument(
            "tensor_parallel_size", parts, f"cuts {size} inputs within groups of {weight.group}"
        )
    return abstract(plain, weight, parts=parts)


def _cuts(plain: jax.ShapeDtypeStruct, source: Sequence[Piece]) -> list[int]:
    """Inputs at which pieces of the checkpoint begin or end."""
    columns = [
        side
        for piece in source
        for side in (piece.columns, *piece.part[len(plain.shape) - 1 :])
        if isinstance(side, slice)
    ]
    return [end for side in columns for end in (side.start, side.stop) if end is not None]


def _loses_much(axes: tuple[str | None, ...]) -> bool:
    """Whether a weight loses much in four bits.

    These are the weights of queries, keys and values, whose errors enter every score, and an MLP's last
    matrix, whose inputs have outliers.
    """
    return axes[0] == "kv_heads" or (axes[-1] == "ffn" and len(axes) == 2)
