"""The encoders of Qwen's vision models: Qwen2.5-VL, most of whose layers attend within windows of the
image; and Qwen3-VL to Qwen3.6, with rotary and learned positions, and Qwen3-VL's DeepStack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.models.layers import LayerNorm, NormSettings, RMSNorm, whole_matrix
from jengine.vision.parts import Attention, Linear, axial_rotation, within_runs, within_segments
from pallas_kernels.elementwise.activations import ACTIVATIONS
from pallas_kernels.elementwise.rotary import Rotation, rotate_by_xla

THETA = 10000.0  # of rotary embedding
NORMS = NormSettings(1e-6)
WINDOWS = 2**16  # more than an image has


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
        normed = self.norm(x.reshape(-1, len(self.norm.weight[...]))).reshape(-1, self.up.inputs)
        return self.down(ACTIVATIONS["gelu"](self.up(normed)))


class Block(nnx.Module):
    """A layer, of Qwen2.5-VL if it is gated."""

    def __init__(
        self, fields: Mapping[str, Any], dtype: jax.typing.DTypeLike, name: str, *, gated: bool
    ) -> None:
        hidden, ffn = int(fields["hidden_size"]), int(fields["intermediate_size"])
        norm, usual = (RMSNorm, "silu") if gated else (LayerNorm, "gelu_pytorch_tanh")
        up, down = ("up_proj", "down_proj") if gated else ("linear_fc1", "linear_fc2")
        self.activation = fields.get("hidden_act", usual)
        self.norm1 = norm(hidden, NORMS, dtype, f"{name}.norm1")
        self.attention = SelfAttention(hidden, int(fields["num_heads"]), dtype, f"{name}.attn")
        self.norm2 = norm(hidden, NORMS, dtype, f"{name}.norm2")
        self.gate = Linear(hidden, ffn, dtype, f"{name}.mlp.gate_proj") if gated else None
        self.up = Linear(hidden, ffn, dtype, f"{name}.mlp.{up}")
        self.down = Linear(ffn, hidden, dtype, f"{name}.mlp.{down}")

    def __call__(self, x: jax.Array, rotation: Rotation, attend: Attention) -> jax.Array:
        x += self.attention(self.norm1(x), rotation, attend)
        y, activation = self.norm2(x), ACTIVATIONS[self.activation]
        inner = activation(self.up(y)) if self.gate is None else activation(self.gate(y)) * self.up(y)
        return x + self.down(inner)


class WindowEncoder(nnx.Module):
    def __init__(
        self,
        fields: Mapping[str, Any],
        patch: tuple[int, ...],
        merge: int,
        window: int,
        dtype: jax.typing.DTypeLike,
    ) -> None:
        """patch, merge: see `QwenVision`. window: maximum number of patches of a window."""
        hidden, out = int(fields["hidden_size"]), int(fields["out_hidden_size"])
        features, merged = math.prod(patch), hidden * merge**2
        self.dtype, self.window = jnp.dtype(dtype), window
        self.head_dim = hidden // int(fields["num_heads"])
        self.everywhere = tuple(fields.get("fullatt_block_indexes") or ())  # layers without windows
        self.embed = Linear(
            features, hidden, dtype, "visual.patch_embed.proj", biased=False, stored=(hidden, *patch)
        )
        self.blocks = nnx.List(
            [Block(fields, dtype, f"visual.blocks.{i}", gated=True) for i in range(int(fields["depth"]))]
        )
        self.merger = Merger(
            RMSNorm(hidden, NORMS, dtype, "visual.merger.ln_q"),
            Linear(merged, merged, dtype, "visual.merger.mlp.0"),
            Linear(merged, out, dtype, "visual.merger.mlp.2"),
        )

    def __call__(self, pixels: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        """Embeddings of patches, see Vision.encode."""
        rows, columns, windows, moves = places.T
        x = self.embed(pixels.astype(self.dtype))
        rotation = axial_rotation(self.head_dim, THETA, rows, columns)
        everywhere, nearby = within_segments(segments), within_runs(segments * WINDOWS + windows, self.window)
        for i, block in enumerate(self.blocks):
            x = block(x, rotation, everywhere if i in self.everywhere else nearby)
        merged = self.merger(x)
        moved = jnp.arange(len(merged)) + moves[:: len(x) // len(merged)]
        return jnp.zeros_like(merged).at[moved].set(merged, unique_indices=True)


class Encoder(nnx.Module):
    def __init__(
        self, fields: Mapping[str, Any], patch: tuple[int, ...], merge: int, dtype: jax.typing.DTypeLike
    ) -> None:
        """patch, merge: see `QwenVision`."""
        hidden, out = int(fields["hidden_size"]), int(fields["out_hidden_size"])
        table = (int(fields["num_position_embeddings"]), hidden)
        self.side = int(table[0] ** 0.5)
        self.head_dim = hidden // int(fields["num_heads"])
        self.taps = tuple(fields.get("deepstack_visual_indexes") or ())
        stored = hidden, *patch
        self.embed = Linear(math.prod(patch), hidden, dtype, "visual.patch_embed.proj", stored=stored)
        self.positions = whole_matrix("visual.pos_embed.weight", dtype, *table, exact=True)
        self.blocks = nnx.List(
            [Block(fields, dtype, f"visual.blocks.{i}", gated=False) for i in range(int(fields["depth"]))]
        )
        merged = hidden * merge**2

        def merger(place: str, normed: int) -> Merger:
            return Merger(
                LayerNorm(normed, NORMS, dtype, f"{place}.norm"),
                Linear(merged, merged, dtype, f"{place}.linear_fc1"),
                Linear(merged, out, dtype, f"{place}.linear_fc2"),
            )

        self.merger = merger("visual.merger", hidden)
        taps = (f"visual.deepstack_merger_list.{i}" for i in range(len(self.taps)))
        self.mergers = nnx.List([merger(tap, merged) for tap in taps])

    def __call__(self, pixels: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        """Embeddings of patches, see Vision.encode."""
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
