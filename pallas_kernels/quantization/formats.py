"""Formats of weights, as plain data. `products.weights` has the class that multiplies by each."""

from __future__ import annotations

from dataclasses import dataclass

FP8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the numbers of a weight are stored, and what its products take.

    Attributes:
        numbers: a dtype, or the kind of packed numbers.
        bits: of a number.
        group: inputs that share a scale; 0: all inputs of an output share it, or there are no scales.
        offset: whether groups have offsets beside their scales.
        inputs: the dtype to which products quantize their other side, with a scale for each row or, of eight
            bits, each group of inputs; None: they take it in 16 or 32 bits.
    """

    numbers: str
    bits: int
    group: int = 0
    offset: bool = False
    inputs: str | None = None

    @property
    def name(self) -> str:
        """Part of the keys of measured choices, which are kept in files. Formats that differ in groups or
        offsets alone have the same name, and so have those of `Int4`.
        """
        if self.numbers in ("int4", "e2m1"):
            return "w4a8" if self.inputs else "int4"
        if self.bits == 8 and self.group:
            return "fp8 inputs by group" if self.inputs else "by group"
        if self.inputs is None:
            return self.numbers
        return "w8a8" if self.inputs == "int8" else "fp8 inputs"


INT8, INT8_BY_INT8 = WeightFormat("int8", 8), WeightFormat("int8", 8, inputs="int8")
FP8_BY_FP8 = WeightFormat(FP8, 8, inputs=FP8)
INT4 = WeightFormat("int4", 4, group=32)
INT4_BY_INT8 = WeightFormat("int4", 4, group=32, inputs="int8")
