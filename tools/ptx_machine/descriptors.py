"""Matrix descriptors of wgmma, and where the operand's numbers lie in shared memory.

PTX ISA, "Asynchronous warpgroup level matrix: shared memory matrix layout" and "Matrix descriptor format".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tools.ptx_machine.numbers import Array
from tools.ptx_machine.swizzle import swizzled

MODES = {0: 16, 1: 128, 2: 64, 3: 32}  # swizzle in bytes; 16: none


@dataclass(frozen=True)
class MatrixDescriptor:
    """Attributes:
    start: address in shared memory.
    leading, stride: byte offsets between core matrices. K-major: `stride` between groups of 8 rows; without
        swizzle `leading` between groups of 16 bytes along K. MN-major: `stride` between groups of 8 along
        K, `leading` between lines along M or N; without swizzle the other way around.
    base_offset: of patterns that do not begin at a multiple of their size.
    swizzle: 16 (none), 32, 64 or 128 bytes.
    """

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: int

    def addresses(self, rows: Array, k: int, itemsize: int, transposed: bool = False) -> Array:
        """Addresses [rows, k] in bytes of numbers of an operand.

        Args:
            rows: their indices along M or N.
            k: numbers along K, from the first.
            transposed: MN-major: neighbours along M or N are neighbours in memory. Else K-major.

        Raises:
            NotImplementedError: the base offset is not 0.
        """
        if self.base_offset:
            raise NotImplementedError(f"matrix descriptor with base offset {self.base_offset}")
        row, column = rows[:, None], np.arange(k)[None]
        width = self.swizzle
        per = width // itemsize  # numbers in a line
        if width == 16:
            across, along = (self.leading, self.stride) if transposed else (self.stride, self.leading)
        else:
            across, along = self.stride, self.leading
        if transposed:
            at = column // 8 * across + column % 8 * width + row // per * along + row % per * itemsize
        elif width == 16:
            at = row // 8 * across + row % 8 * width + column // per * along + column % per * itemsize
        else:  # lines hold all of an instruction's K; the start is moved within them from step to step
            at = row // 8 * across + row % 8 * width + column * itemsize
        return swizzled(self.start + at, width)


def decoded(descriptor: int) -> MatrixDescriptor:
    """Decode the 64 bits of a descriptor."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    return MatrixDescriptor(start, leading, stride, descriptor >> 49 & 7, MODES[descriptor >> 62])
