"""Common parts of the kernels for `mma.sync`: tiles of shared memory and copies to them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def tiled(shape: tuple[int, ...], dtype: jnp.dtype[Any], size: int) -> Any:
    """Shared memory in tiles of 8 rows by `size` bytes, swizzled, so that loads of the tensor cores have no
    bank conflicts."""
    tiles = plgpu.TilingTransform((8, size // dtype.itemsize))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiles, plgpu.SwizzleTransform(size)))  # type: ignore[abstract]


def copy(source: Any, target: Any, landed: Any) -> None:
    """Starts a copy to shared memory; reads nothing outside the source.

    Args:
        landed: the barrier that TMA signals; None: cp.async copies.
    """
    plgpu.copy_gmem_to_smem(source, target, landed, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
