"""The encoder of Gemma 4: attention over the image with two rotations, learned positions of rows and of
columns, and means of squares of patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.models.layers import NormSettings, RMSNorm, param, unit, whole_matrix
from jengine.models.pieces import Piece
from jengine.models.rope import Rope
from jengine.vision.parts import Attention, Linear, within_segments
from pallas_kernels.elementwise.activations import ACTIVATIONS
from pallas_kernels.elementwise.rotary import Rotation, rotate_by_xla

BOUNDS = "input_min", "input_max", "output_min", "output_max"


class Clipped(nnx.Module):
    """A product without a bias whose inputs and outputs may be kept within bounds."""

    def __init__(
        self, inputs: int, outputs: int, dtype: jax.typing.DTypeLike, name: str, *, clipped: bool
    ) -> None:
        self.linear = Linear(inputs, outputs, dtype, f"{name}.linear", biased=False)
        bounds = (param((1,), dtype, (None,), Piece(f"{name}.{bound}", ())) for bound in BOUNDS)
        self.bounds = nnx.List([*bounds] if clipped else [])

    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.bounds:
            return self.linear(x)
        least, greatest, least_out, most_out = (bound.get_value() for bound in self.bounds)
        return jnp.clip(self.linear(jnp.clip(x, least, greatest)), least_out, most_out)


class Block(nnx.Module):
    """A layer; fields: of vision_config."""

    def __init__(self, fields: Mapping[str, Any], dtype: jax.typing.DTypeLike, name: str) -> None:
        hidden, ffn, dim = (int(fields[n]) for n in ("hidden_size", "intermediate_size", "head_dim"))
        eps = fields["rms_norm_eps"]
        self.heads, self.kv_heads = int(fields["num_attention_heads"]), int(fields["num_key_value_heads"])
        self.eps, self.activation = eps, fields["hidden_activation"]

        def linear(inputs: int, outputs: int, place: str) -> Clipped:
            clipped = bool(fields["use_clipped_linears"])
            return Clipped(inputs, outputs, dtype, f"{name}.{place}", clipped=clipped)

        def norm(place: str, size: int = hidden) -> RMSNorm:
            return RMSNorm(size, NormSettings(eps), dtype, f"{name}.{place}")

        self.q, self.k, self.v = (
            linear(hidden, heads * dim, f"self_attn.{part}_proj")
            for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        self.o = linear(self.heads * dim, hidden, "self_attn.o_proj")
        self.q_norm, self.k_norm = (norm(f"self_attn.{part}_norm", dim) for part in "qk")
        self.gate, self.up = (linear(hidden, ffn, f"mlp.{part}_proj") for part in ("gate", "up"))
        self.down = linear(ffn, hidden, "mlp.down_proj")
        self.before, self.after = norm("input_layernorm"), norm("post_attention_layernorm")
        self.mlp_before = norm("pre_feedforward_layernorm")
        self.mlp_after = norm("post_feedforward_layernorm")

    def __call__(self, x: jax.Array, rotations: tuple[Rotation, Rotation], attend: Attention) -> jax.Array:
        x += self.after(self.attention(self.before(x), rotations, attend))
        y = self.mlp_before(x)
        y = self.down(ACTIVATIONS[self.activation](self.gate(y)) * self.up(y))
        return x + self.mlp_after(y)

    def attention(self, x: jax.Array, rotations: tuple[Rotation, Rotation], attend: Attention) -> jax.Array:
        def turned(x: jax.Array) -> jax.Array:
            """The first half of a head's channels turns with the column, the second with the row."""
            halves = zip(jnp.split(x, 2, axis=-1), rotations, strict=True)
            return jnp.concatenate([rotate_by_xla(half, rotation) for half, rotation in halves], axis=-1)

        q = self.q(x).reshape(len(x), self.heads, -1)
        k, v = (part(x).reshape(len(x), self.kv_heads, -1) for part in (self.k, self.v))
        q, k, v = turned(self.q_norm(q)), turned(self.k_norm(k)), unit(v, self.eps)
        k, v = (jnp.repeat(part, self.heads // self.kv_heads, axis=1) for part in (k, v))
        return self.o(attend(q, k, v).reshape(len(x), -1))


class Encoder(nnx.Module):
    def __init__(
        self, fields: Mapping[str, Any], hidden: int, theta: float, dtype: jax.typing.DTypeLike
    ) -> None:
        """hidden: of the text model; theta: of the rotations."""
        size, place = int(fields["hidden_size"]), "vision_tower"
        table = 2, int(fields["position_embedding_size"]), size
        self.patches_per_row, self.eps = int(fields["pooling_kernel_size"]) ** 2, fields["rms_norm_eps"]
        half = int(fields["head_dim"]) // 2
        self.rope = Rope(tuple(theta ** (-i / half) for i in range(0, half, 2)))
        features = 3 * int(fields["patch_size"]) ** 2
        embedder = f"{place}.patch_embedder"
        self.embed = Linear(features, size, dtype, f"{embedder}.input_proj", biased=False)
        self.positions = whole_matrix(f"{embedder}.position_embedding_table", dtype, *table, exact=True)
        layers = range(int(fields["num_hidden_layers"]))
        self.blocks = nnx.List([Block(fields, dtype, f"{place}.encoder.layers.{i}") for i in layers])
        self.standard = nnx.List(
            [
                param((size,), dtype, (None,), Piece(f"{place}.std_{part}", (size,)))
                for part in ("bias", "scale")
                if fields["standardize"]
            ]
        )
        self.projection = Linear(size, hidden, dtype, "embed_vision.embedding_projection", biased=False)

    def __call__(self, pixels: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        """Embeddings of patches, see Vision.encode."""
        table = self.positions.get_value()
        columns, rows = places.T
        x = self.embed((2 * (pixels - 0.5)).astype(table.dtype)) + (table[0][columns] + table[1][rows])
        rotations = self.rope.cos_sin(columns), self.rope.cos_sin(rows)
        attend = within_segments(segments, scale=1.0)
        for block in self.blocks:
            x = block(x, rotations, attend)
        x = x.reshape(-1, self.patches_per_row, x.shape[1]).astype(jnp.float32).mean(1)
        x = x.astype(table.dtype).astype(jnp.float32) * x.shape[1] ** 0.5
        if self.standard:
            bias, scale = (part.get_value().astype(jnp.float32) for part in self.standard)
            x = (x - bias) * scale
        return self.projection(unit(x.astype(table.dtype), self.eps))
