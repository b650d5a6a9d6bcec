"""The values of the option quantization, and the options of four-bit weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jengine.base.errors import InvalidArgument
from pallas_kernels.quantization.formats import (
    FP8_BY_FP8,
    INT4,
    INT4_BY_INT8,
    INT8,
    INT8_BY_INT8,
    WeightFormat,
)

Quantization = Literal["int4", "int4_mixed", "w4a8", "int8", "w8a8", "fp8", "none"]


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """Formats of a model's weights.

    Attributes:
        matrices: of products in layers.
        vocabulary: of embeddings and output heads.
        sensitive: of the matrices that lose most in few bits; None: as other matrices.
    """

    matrices: WeightFormat
    vocabulary: WeightFormat
    sensitive: WeightFormat | None = None


QUANTIZATIONS: dict[str, ModelFormats] = {
    "int4": ModelFormats(INT4, vocabulary=INT8),
    "int4_mixed": ModelFormats(INT4, vocabulary=INT8, sensitive=INT8),
    "w4a8": ModelFormats(INT4_BY_INT8, vocabulary=INT8_BY_INT8),
    "int8": ModelFormats(INT8, vocabulary=INT8),
    "w8a8": ModelFormats(INT8_BY_INT8, vocabulary=INT8_BY_INT8),
    "fp8": ModelFormats(FP8_BY_FP8, vocabulary=INT8),
}
# values that take a group size and calibration
FOUR_BITS = tuple(name for name, formats in QUANTIZATIONS.items() if formats.matrices.numbers == "int4")


def check_four_bits(quantization: str | None, group_size: int, calibration_data: object) -> None:
    """Raises InvalidArgument unless these options of EngineConfig fit together."""
    if group_size not in (32, 64, 128):
        raise InvalidArgument("quantization_group_size", group_size, "must be 32, 64 or 128")
    for name, value, default in (
        ("quantization_group_size", group_size, 128),
        ("calibration_data", calibration_data, None),
    ):
        if value != default and quantization not in FOUR_BITS:
            raise InvalidArgument(
                name, value, f"needs quantization={', '.join(FOUR_BITS[:-1])} or {FOUR_BITS[-1]}"
            )
