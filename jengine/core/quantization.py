"""The values of the option quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
