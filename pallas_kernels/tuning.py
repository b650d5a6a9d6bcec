"""Parameters of kernels on a device, by rules of shape and device."""

from __future__ import annotations

import jax

CORES = 132  # multiprocessors of an H100 or H200, for devices that do not report it
BLOCKS = 2  # desired blocks per multiprocessor


def cores(device: jax.Device | None) -> int:
    """Number of multiprocessors of the device."""
    return getattr(device, "core_count", None) or CORES


def decode_blocks(cache: str, head_dim: int, device: jax.Device | None) -> int:
    """Thread blocks of a work list of decode attention: as many as the device runs at a time, for any number
    of rows.

    Args:
        cache: stored dtype.
    """
    itemsize = jax.numpy.dtype(cache).itemsize
    return cores(device) * (BLOCKS if head_dim <= 64 * itemsize else 1)
