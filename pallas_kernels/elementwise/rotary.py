"""Rotary embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import devices
from pallas_kernels.targets import on_cpu

Rotation = tuple[jax.Array, jax.Array]  # cos and sin, float32 [tokens, pairs]


def rotate(x: jax.Array, rotation: Rotation, *, device: jax.Device | None = None) -> jax.Array:
    """Rotary embedding as `rotate_by_xla`, on a CPU by a kernel. GPUs need none: `kv_write` rotates, and
    elsewhere XLA fuses it.
    """
    if cpu_rotates(x, rotation, device):
        from pallas_kernels.elementwise import cpu

        return cpu.rotate(x, *rotation)
    return rotate_by_xla(x, rotation)


def rotate_by_xla(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotary embedding (Su et al., 2021) of x [tokens, heads, head_dim], in float32.

    Args:
        rotation: cos and sin, float32 [tokens, pairs]. Channels i and i + pairs of each head rotate together
            (the convention with halves). Channels from 2 * pairs on are unchanged.
    """
    cos, sin = (part[:, None] for part in rotation)
    pairs = cos.shape[-1]
    first, second = (x[..., i * pairs : (i + 1) * pairs].astype(jnp.float32) for i in range(2))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(
        x.dtype
    )
    return jnp.concatenate([turned, x[..., 2 * pairs :]], axis=-1)


def cpu_rotates(x: jax.Array, rotation: Rotation, device: jax.Device | None) -> bool:
    """Whether a CPU's kernel rotates x [..., head_dim]."""
    if not on_cpu(device) or devices.cpu_refused() is not None:
        return False
    from pallas_kernels.elementwise import cpu

    return cpu.rotates(str(x.dtype), x.shape[-1], rotation[0].shape[-1])
