"""Norms."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.devices import cpu_refused, traced_for_cpu


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """Root mean square norm over the last axis, computed in float32.

    Args:
        weight: [x.shape[-1]], to which the offset is added.
    """
    xla = partial(_norm_by_xla, eps=eps, offset=offset)
    if not traced_for_cpu() or cpu_refused() is not None:
        return xla(x, weight)

    from pallas_kernels.elementwise import cpu

    if not cpu.norms(x, weight):
        return xla(x, weight)
    y: jax.Array = lax.platform_dependent(
        x, weight, cpu=partial(cpu.rms_norm, eps=eps, offset=offset), default=xla
    )
    return y


def _norm_by_xla(x: jax.Array, weight: jax.Array, eps: float, offset: float) -> jax.Array:
    y = x.astype(jnp.float32)
    y *= lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * (weight.astype(jnp.float32) + offset)).astype(x.dtype)
