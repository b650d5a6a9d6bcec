"""Tensor maps: which bytes of global and shared memory a TMA copy moves.

PTX ISA, "Tensors" and `cp.async.bulk.tensor`, tiled mode; CUDA driver API, cuTensorMapEncodeTiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tools.ptx_machine.numbers import Array
from tools.ptx_machine.swizzle import WIDTHS, swizzled

ALIGNMENT = 128  # of a box in shared memory
MOST = 256  # numbers of a box along a dimension


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that is copied at once. Dimensions are innermost first, as PTX's
    coordinates.

    Attributes:
        base: address.
        itemsize: bytes of a number.
        sizes: of the tensor.
        strides: in bytes; the first is the itemsize.
        box: sizes of the box.
        swizzle: of the box in shared memory: 16 (none), 32, 64 or 128 bytes.
    """

    base: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 16

    def problems(self) -> list[str]:
        """Why the driver would refuse it; empty if it would not."""
        bad = []
        rank = len(self.sizes)
        if not 1 <= rank <= 5:
            bad.append(f"rank {rank}: must be 1 to 5")
        if not rank == len(self.strides) == len(self.box):
            bad.append(f"sizes {self.sizes}, strides {self.strides} and box {self.box} differ in rank")
        if self.itemsize not in (1, 2, 4, 8):
            bad.append(f"itemsize {self.itemsize}: must be 1, 2, 4 or 8")
        if self.base % 16:
            bad.append(f"base {self.base:#x}: must be a multiple of 16")
        if any(stride % 16 or not 0 <= stride < 1 << 40 for stride in self.strides[1:]):
            bad.append(f"strides {self.strides}: all but the first must be multiples of 16 below 2^40")
        if self.strides[:1] != (self.itemsize,):
            bad.append(f"strides {self.strides}: the first must be the itemsize, {self.itemsize}")
        if any(not 1 <= size <= 1 << 32 for size in self.sizes):
            bad.append(f"sizes {self.sizes}: must be 1 to 2^32")
        if any(not 1 <= size <= MOST for size in self.box):
            bad.append(f"box {self.box}: must be 1 to {MOST}")
        if self.swizzle not in WIDTHS:
            bad.append(f"swizzle {self.swizzle}: must be one of {WIDTHS}")
        line = self.box[0] * self.itemsize if self.box else 0
        if line % 16:
            bad.append(f"box {self.box}: its first dimension has {line} bytes, must be a multiple of 16")
        if self.swizzle > 16 and line > self.swizzle:
            bad.append(f"box {self.box}: its first dimension has {line} bytes, the swizzle {self.swizzle}")
        return bad

    @property
    def size(self) -> int:
        """Bytes of a box, which an mbarrier counts. Also of boxes that are partly outside of the tensor."""
        return int(np.prod(self.box)) * self.itemsize

    @cached_property
    def _index(self) -> tuple[Array, ...]:
        """Index of each number of a box along each dimension. Numbers in the order of shared memory."""
        grid = np.indices(self.box[::-1]).reshape(len(self.box), -1)
        return tuple(grid[::-1])

    @cached_property
    def _offsets(self) -> Array:
        offsets = sum(i * stride for i, stride in zip(self._index, self.strides, strict=True))
        return np.asarray(offsets, np.int64)

    def elements(self, coords: Sequence[int]) -> tuple[Array, Array | None]:
        """Numbers of a box at coordinates, in the order of shared memory: their offsets in bytes from `base`,
        and whether they lie inside of the tensor; None if all do.

        Numbers outside are loaded as zeros and not stored.

        Raises:
            ValueError: the coordinates have another rank.
        """
        if len(coords) != len(self.sizes):
            raise ValueError(f"{len(coords)} coordinates for a tensor map of rank {len(self.sizes)}")
        at = self._offsets + sum(c * stride for c, stride in zip(coords, self.strides, strict=True))
        dimensions = list(zip(self._index, coords, self.sizes, self.box, strict=True))
        if all(c >= 0 and c + b <= size for _, c, size, b in dimensions):
            return at, None
        inside = np.ones(len(at), bool)
        for index, c, size, _ in dimensions:
            inside &= (index + c >= 0) & (index + c < size)
        return at, inside

    def bytes(self, coords: Sequence[int]) -> tuple[Array, Array | None]:
        """Bytes of a box; see `elements`."""
        at, inside = self.elements(coords)
        spread = (at[:, None] + np.arange(self.itemsize)).ravel()
        return spread, None if inside is None else np.repeat(inside, self.itemsize)

    def places(self, address: int) -> Array:
        """Address in shared memory of each byte of a box at the address, in the order of `bytes`.

        The swizzle takes the pattern's row from the address in shared memory.
        """
        return swizzled(address + np.arange(self.size), self.swizzle)
