"""The encoder of Qwen2.5-VL: most layers attend within windows of the image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.vision.parts import (
    Attention,
    Linear,
    RMSNorm,
    axial_rotation,
    within_runs,
    within_segments,
)
from jengine.vision.qwen import Preparation
from jengine.vision.qwen_encoder import THETA, Merger, SelfAttention
from pallas_kernels.elementwise.activations import ACTIVATIONS
from pallas_kernels.elementwise.rotary import Rotation

EPSILON = 1e-6
WINDOWS = 2**16  # more than an image has


class Block(nnx.Module):
    def __init__(self, fields: Mapping[str, Any], dtype: jax.typing.DTypeLike, name: str) -> None:
        hidden, ffn = int(fields["hidden_size"]), int(fields["intermediate_size"])
        self.activation = fields.get("hidden_act", "silu")
        self.norm1 = RMSNorm(hidden, EPSILON, dtype, f"{name}.norm1")
        self.attention = SelfAttention(hidden, int(fields["num_heads"]), dtype, f"{name}.attn")
        self.norm2 = RMSNorm(hidden, EPSILON, dtype, f"{name}.norm2")
        self.gate = Linear(hidden, ffn, dtype, f"{name}.mlp.gate_proj")
        self.up = Linear(hidden, ffn, dtype, f"{name}.mlp.up_proj")
        self.down = Linear(ffn, hidden, dtype, f"{name}.mlp.down_proj")

    def __call__(self, x: jax.Array, rotation: Rotation, attend: Attention) -> jax.Array:
        x += self.attention(self.norm1(x), rotation, attend)
        y = self.norm2(x)
        return x + self.down(ACTIVATIONS[self.activation](self.gate(y)) * self.up(y))


class Encoder(nnx.Module):
    def __init__(
        self,
        fields: Mapping[str, Any],
        prepared: Preparation,
        window: int,
        dtype: jax.typing.DTypeLike,
        name: str,
    ) -> None:
        """window: the most patches of one."""
        hidden, out = int(fields["hidden_size"]), int(fields["out_hidden_size"])
        patch, merged = (hidden, 3, prepared.frames, prepared.size, prepared.size), hidden * prepared.merge**2
        self.dtype, self.window = jnp.dtype(dtype), window
        self.head_dim = hidden // int(fields["num_heads"])
        self.everywhere = tuple(fields.get("fullatt_block_indexes") or ())  # layers without windows
        self.embed = Linear(
            prepared.features, hidden, dtype, f"{name}.patch_embed.proj", biased=False, stored=patch
        )
        self.blocks = nnx.List(
            [Block(fields, dtype, f"{name}.blocks.{i}") for i in range(int(fields["depth"]))]
        )
        self.merger = Merger(
            RMSNorm(hidden, EPSILON, dtype, f"{name}.merger.ln_q"),
            Linear(merged, merged, dtype, f"{name}.merger.mlp.0"),
            Linear(merged, out, dtype, f"{name}.merger.mlp.2"),
        )

    def __call__(self, pixels: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        """As Vision.encode."""
        rows, columns, windows, moves = places.T
        x = self.embed(pixels.astype(self.dtype))
        rotation = axial_rotation(self.head_dim, THETA, rows, columns)
        everywhere, nearby = within_segments(segments), within_runs(segments * WINDOWS + windows, self.window)
        for i, block in enumerate(self.blocks):
            x = block(x, rotation, everywhere if i in self.everywhere else nearby)
        merged = self.merger(x)
        moved = jnp.arange(len(merged)) + moves[:: len(x) // len(merged)]
        return jnp.zeros_like(merged).at[moved].set(merged, unique_indices=True)
