"""What the versions of JAX that are supported do under different names."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def store(target: Any, values: Any) -> None:
    """Writes an array to a Mosaic GPU reference, in pieces as small as its layout asks for."""
    if hasattr(plgpu, "store"):
        plgpu.store(target, values, optimized=False)
    else:  # jax 0.11, which does not ask
        target[...] = values
