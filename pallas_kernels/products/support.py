"""What GPUs' kernels for products support. Each `why_` function returns the reason why not, or None.

Arrays may be any objects with a shape and a dtype. The device is known to be one of the kernel's target.
"""

from __future__ import annotations

import math

from pallas_kernels.products.rows import Rows
from pallas_kernels.targets import DTYPES

GRID = 64  # the numbers of outputs and inputs are multiples of this
SIZE_GRID = 128  # the size of a quantized row is a multiple of this
EIGHT_BIT_ROWS = 512  # maximum of a dense product; for more, cuBLAS is faster, even if it converts the weight


def why_sizes_unsupported(
    shape: tuple[int, ...], *, grouped: bool, inputs: int = GRID, outs: int = GRID
) -> str | None:
    """Why a kernel does not support a weight of this shape, [*out, in], or [groups, *out, in] if grouped.

    Args:
        inputs, outs: what the numbers of inputs and of outputs must be multiples of.
    """
    sizes = ("out", math.prod(shape[grouped:-1]), outs), ("in", shape[-1], inputs)
    wrong = (
        f"{name}={size}: the kernel takes multiples of {grid}" for name, size, grid in sizes if size % grid
    )
    return next(wrong, None)


def why_no_hopper_rows(x: Rows) -> str | None:
    """Why Hopper's kernel does not quantize rows x [rows, size]."""
    if str(x.dtype) not in (*DTYPES, "float32"):
        return f"dtype={x.dtype}: the kernel takes {', '.join((*DTYPES, 'float32'))}"
    if x.shape[1] % SIZE_GRID:
        return f"size={x.shape[1]}: the kernel takes multiples of {SIZE_GRID}"
    return None
