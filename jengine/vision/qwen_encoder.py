"""What the encoders of Qwen's families share: attention, and how patches are merged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.vision.parts import Attention, LayerNorm, Linear, RMSNorm
from pallas_kernels.elementwise.activations import ACTIVATIONS
from pallas_kernels.elementwise.rotary import Rotation, rotate_by_xla

THETA = 10000.0  # of rotary embedding


class SelfAttention(nnx.Module):
    def __init__(self, hidden: int, heads: int, dtype: jax.typing.DTypeLike, name: str) -> None:
        self.heads = heads
        self.qkv = Linear(hidden, 3 * hidden, dtype, f"{name}.qkv")
        self.proj = Linear(hidden, hidden, dtype, f"{name}.proj")

    def __call__(self, x: jax.Array, rotation: Rotation, attend: Attention) -> jax.Array:
        q, k, v = jnp.unstack(self.qkv(x).reshape(len(x), 3, self.heads, -1), axis=1)
        return self.proj(attend(rotate_by_xla(q, rotation), rotate_by_xla(k, rotation), v).reshape(x.shape))


class Merger(nnx.Module):
    """Makes one embedding of several patches. The norm is of each patch, or of all of them together."""

    def __init__(self, norm: LayerNorm | RMSNorm, up: Linear, down: Linear) -> None:
        self.norm, self.up, self.down = norm, up, down

    def __call__(self, x: jax.Array) -> jax.Array:
        """[N, hidden] -> [N // patches, out]."""
        normed = self.norm(x.reshape(-1, self.norm.size)).reshape(-1, self.up.inputs)
        return self.down(ACTIVATIONS["gelu"](self.up(normed)))
