"""Quantized tensors as checkpoints store them, in one form: numbers, with scales and offsets for blocks of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Groups:
    """Stands for values * scale + offset.

    A zero point z of a group is the offset -z * scale.

    Attributes:
        values: numbers [out, in], int8 or float8_e4m3fn.
        scale: float32 [out or fewer, in or fewer]: each for as many consecutive outputs and inputs as there are times fewer.
        offset: as scale; None is zero.
        block: outputs and inputs that share a scale, the last ones perhaps fewer.
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
        """Scales or offsets for each number."""
        rows, columns = self.values.shape
        for axis, each in enumerate(self.block):
            by_block = by_block if each == 1 else np.repeat(by_block, each, axis)
        return by_block[:rows, :columns]

    def by_output(self) -> np.ndarray:
        """The scales [out] of numbers whose outputs have one each, or share one."""
        return np.asarray(np.repeat(self.scale[:, 0], self.block[0])[: self.values.shape[0]])

    def by_group(self, group: int) -> Groups:
        """With scales for each output and so many inputs, of which blocks are multiples."""
        rows, columns = self.values.shape

        def cut(by_block: np.ndarray) -> np.ndarray:
            taller = np.repeat(by_block, self.block[0], 0)[:rows]
            return np.repeat(taller, self.block[1] // group, 1)[:, : -(-columns // group)]

        return Groups(self.values, cut(self.scale), None if self.offset is None else cut(self.offset), (1, group))


class StoredTensor:
    """A quantized tensor of a file, read when it is needed.

    Attributes:
        shape, dtype: of what it stands for.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, shape: tuple[int, ...], read: Callable[[], Groups | np.ndarray]) -> None:
        """read: gives a float array of this shape where there are no numbers to keep."""
        self.shape, self.read = shape, read

    def groups(self) -> Groups:
        found = self.read()
        assert isinstance(found, Groups)
        return found

    def dense(self) -> np.ndarray:
        """float32, or what the file has."""
        found = self.read()
        return found.dense() if isinstance(found, Groups) else found


class Tensor(NamedTuple):
    """A tensor and the file it lies in."""

    file: Path
    array: np.ndarray | StoredTensor


def dense(array: np.ndarray | StoredTensor) -> np.ndarray:
    return array.dense() if isinstance(array, StoredTensor) else array
