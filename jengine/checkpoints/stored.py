"""Quantized tensors of all checkpoint formats in a common form: numbers, with scales and offsets for blocks
of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

BLOCK = 1 << 18  # numbers that are converted at a time


@dataclass(frozen=True)
class GroupedValues:
    """Represents values * scale + offset.

    A zero point z of a group is the offset -z * scale.

    Attributes:
        values: numbers [out, in], int8 or float8_e4m3fn.
        scale: float32 [out / a, in / b]: one for each block of a outputs and b inputs.
        offset: as scale; None: zero.
        block: (a, b); blocks at the end may be smaller.
    """

    values: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None
    block: tuple[int, int]

    def dense(self) -> np.ndarray:
        """float32 [out, in]."""
        dense: np.ndarray = self.values.astype(np.float32) * self.spread(self.scale)
        return dense if self.offset is None else dense + self.spread(self.offset)

    def spread(self, by_block: np.ndarray) -> np.ndarray:
        """Repeats scales or offsets for each number."""
        rows, columns = self.values.shape
        for axis, each in enumerate(self.block):
            by_block = by_block if each == 1 else np.repeat(by_block, each, axis)
        return by_block[:rows, :columns]

    def by_output(self) -> np.ndarray:
        """Scales [out], if each output has one or all share one."""
        return np.asarray(np.repeat(self.scale[:, 0], self.block[0])[: self.values.shape[0]])

    def by_group(self, group: int) -> GroupedValues:
        """This tensor with a scale for each output and group of inputs; blocks must be multiples of the
        group.
        """
        rows, columns = self.values.shape

        def cut(by_block: np.ndarray) -> np.ndarray:
            taller = np.repeat(by_block, self.block[0], 0)[:rows]
            return np.repeat(taller, self.block[1] // group, 1)[:, : -(-columns // group)]

        return GroupedValues(
            self.values, cut(self.scale), None if self.offset is None else cut(self.offset), (1, group)
        )


@dataclass(eq=False)
class StoredTensor:
    """A quantized tensor of a file, read on demand.

    Attributes:
        shape, dtype: of the unquantized tensor.
        read: returns groups, or a float array of this shape if there are no quantized numbers to keep.
        rows: returns some rows of that float array; None: they cannot be read apart.
    """

    dtype = np.dtype(np.float32)

    shape: tuple[int, ...]
    read: Callable[[], GroupedValues | np.ndarray]
    rows: Callable[[slice], np.ndarray] | None = None

    def dense(self) -> np.ndarray:
        """The unquantized array, as float32 or in the file's dtype."""
        values = self.read()
        return values.dense() if isinstance(values, GroupedValues) else values

    def fill(self, out: np.ndarray) -> None:
        """Writes the unquantized array to `out`, of any dtype, a few rows at a time if possible, which needs
        less memory and time.
        """
        if self.rows is None:
            out[...] = self.dense()
            return
        step = max(BLOCK * len(out) // out.size, 1)
        for start in range(0, len(out), step):
            out[start : start + step] = self.rows(slice(start, start + step))


class Tensor(NamedTuple):
    """A tensor and its file."""

    file: Path
    array: np.ndarray | jax.Array | StoredTensor


def dense(array: np.ndarray | jax.Array | StoredTensor) -> np.ndarray:
    """The array on the host."""
    return array.dense() if isinstance(array, StoredTensor) else np.asarray(array)
