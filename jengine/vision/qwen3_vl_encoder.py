"""The encoder of Qwen3-VL, Qwen3.5 and 3.6: attention over the image, rotary and learned positions, and
Qwen3-VL's DeepStack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.models.layers import exact_matrix
from jengine.models.pieces import Piece
from jengine.vision.parts import Attention, LayerNorm, Linear, axial_rotation, within_segments
from jengine.vision.qwen import Preparation
from jengine.vision.qwen_encoder import THETA, Merger, SelfAttention
from pallas_kernels.elementwise.activations import ACTIVATIONS
from pallas_kernels.elementwise.rotary import Rotation

EPSILON = 1e-6


class Block(nnx.Module):
    def __init__(self, fields: Mapping[str, Any], dtype: jax.typing.DTypeLike, name: str) -> None:
        hidden, ffn = int(fields["hidden_size"]), int(fields["intermediate_size"])
        self.activation = fields.get("hidden_act", "gelu_pytorch_tanh")
        self.norm1 = LayerNorm(hidden, EPSILON, dtype, f"{name}.norm1")
        self.attention = SelfAttention(hidden, int(fields["num_heads"]), dtype, f"{name}.attn")
        self.norm2 = LayerNorm(hidden, EPSILON, dtype, f"{name}.norm2")
        self.up = Linear(hidden, ffn, dtype, f"{name}.mlp.linear_fc1")
        self.down = Linear(ffn, hidden, dtype, f"{name}.mlp.linear_fc2")

    def __call__(self, x: jax.Array, rotation: Rotation, attend: Attention) -> jax.Array:
        x += self.attention(self.norm1(x), rotation, attend)
        return x + self.down(ACTIVATIONS[self.activation](self.up(self.norm2(x))))


class Encoder(nnx.Module):
    def __init__(
        self, fields: Mapping[str, Any], prepared: Preparation, dtype: jax.typing.DTypeLike, name: str
    ) -> None:
        hidden, out = int(fields["hidden_size"]), int(fields["out_hidden_size"])
        patch = (hidden, 3, prepared.frames, prepared.size, prepared.size)
        table = (int(fields["num_position_embeddings"]), hidden)
        self.side = int(table[0] ** 0.5)
        self.head_dim = hidden // int(fields["num_heads"])
        self.taps = tuple(fields.get("deepstack_visual_indexes") or ())
        self.embed = Linear(prepared.features, hidden, dtype, f"{name}.patch_embed.proj", stored=patch)
        self.positions = exact_matrix(table, dtype, (None, None), Piece(f"{name}.pos_embed.weight", table))
        self.blocks = nnx.List(
            [Block(fields, dtype, f"{name}.blocks.{i}") for i in range(int(fields["depth"]))]
        )
        merged = hidden * prepared.merge**2

        def merger(place: str, normed: int) -> Merger:
            return Merger(
                LayerNorm(normed, EPSILON, dtype, f"{place}.norm"),
                Linear(merged, merged, dtype, f"{place}.linear_fc1"),
                Linear(merged, out, dtype, f"{place}.linear_fc2"),
            )

        self.merger = merger(f"{name}.merger", hidden)
        taps = (f"{name}.deepstack_merger_list.{i}" for i in range(len(self.taps)))
        self.mergers = nnx.List([merger(tap, merged) for tap in taps])

    def __call__(self, pixels: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        """As Vision.encode."""
        rows, columns, heights, widths = places.T
        x = self.embed(pixels.astype(self.positions.get_value().dtype))
        x += self.interpolated(rows, columns, heights, widths).astype(x.dtype)
        rotation = axial_rotation(self.head_dim, THETA, rows, columns)
        attend, tapped = within_segments(segments), dict[int, jax.Array]()
        for i, block in enumerate(self.blocks):
            x = block(x, rotation, attend)
            if i in self.taps:
                tapped[i] = self.mergers[self.taps.index(i)](x)
        return jnp.concatenate([self.merger(x), *(tapped[i] for i in sorted(self.taps))], axis=-1)

    def interpolated(
        self, rows: jax.Array, columns: jax.Array, heights: jax.Array, widths: jax.Array
    ) -> jax.Array:
        """The learned positions, a square with a corner at each corner of the image, between the patches'
        nearest four: float32 [N, hidden].
        """
        out: jax.Array | float = 0.0
        down, along = _neighbours(rows, heights, self.side), _neighbours(columns, widths, self.side)
        table = self.positions.get_value()
        for row, row_weight in down:
            for column, column_weight in along:
                out += table[row * self.side + column] * (row_weight * column_weight)[:, None]
        return jnp.asarray(out)


def _neighbours(
    index: jax.Array, size: jax.Array, side: int
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The two places of `side` nearest to places of `size`, and their weights. int32[N] each."""
    at = index.astype(jnp.float32) * (side - 1) / jnp.maximum(size - 1, 1).astype(jnp.float32)
    before = jnp.floor(at)
    first, share = before.astype(jnp.int32), at - before
    return (first, 1 - share), (jnp.minimum(first + 1, side - 1), share)
