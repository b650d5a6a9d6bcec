"""Differences between supported versions of JAX."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def store(target: Any, values: Any) -> None:
    """Writes an array to a Mosaic GPU reference, in pieces of the size that its layout needs."""
    if hasattr(plgpu, "store"):
        plgpu.store(target, values, optimized=False)
    else:  # jax 0.11 does this itself
        target[...] = values
