"""Arrays in host memory that a CPU device takes over without a copy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes; XLA copies arrays that start elsewhere


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A new array of zeros. XLA may keep it, so it must not be changed after it was placed on a device."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    array: np.ndarray = memory[start : start + size].view(dtype).reshape(shape)
    return array
