"""SigLIP's encoder (Zhai et al. 2023): learned positions, and attention within frames of one size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.models.layers import exact_matrix
from jengine.models.pieces import Piece
from jengine.vision.parts import Attention, LayerNorm, Linear, within_frames
from pallas_kernels.elementwise.activations import ACTIVATIONS


class Block(nnx.Module):
    def __init__(self, fields: Mapping[str, Any], dtype: jax.typing.DTypeLike, name: str) -> None:
        hidden, ffn, eps = fields["hidden_size"], fields["intermediate_size"], fields["layer_norm_eps"]
        self.heads, self.activation = fields["num_attention_heads"], fields["hidden_act"]
        self.norm1 = LayerNorm(hidden, eps, dtype, f"{name}.layer_norm1")
        self.q, self.k, self.v, self.out = (
            Linear(hidden, hidden, dtype, f"{name}.self_attn.{part}_proj") for part in ("q", "k", "v", "out")
        )
        self.norm2 = LayerNorm(hidden, eps, dtype, f"{name}.layer_norm2")
        self.up = Linear(hidden, ffn, dtype, f"{name}.mlp.fc1")
        self.down = Linear(ffn, hidden, dtype, f"{name}.mlp.fc2")

    def __call__(self, x: jax.Array, attend: Attention) -> jax.Array:
        y = self.norm1(x)
        q, k, v = (part(y).reshape(len(x), self.heads, -1) for part in (self.q, self.k, self.v))
        x += self.out(attend(q, k, v).reshape(x.shape))
        return x + self.down(ACTIVATIONS[self.activation](self.up(self.norm2(x))))


class Siglip(nnx.Module):
    """
    Args:
        fields: of vision_config.
        name: the prefix of the tensors.
    """

    def __init__(self, fields: Mapping[str, Any], dtype: jax.typing.DTypeLike, name: str) -> None:
        size, patch, eps = fields["hidden_size"], fields["patch_size"], fields["layer_norm_eps"]
        channels, place = fields.get("num_channels", 3), f"{name}.embeddings"
        table, filters = ((fields["image_size"] // patch) ** 2, size), (size, channels, patch, patch)
        self.dtype = jnp.dtype(dtype)
        self.embed = Linear(channels * patch**2, size, dtype, f"{place}.patch_embedding", stored=filters)
        positions = Piece(f"{place}.position_embedding.weight", table)
        self.positions = exact_matrix(table, dtype, (None, None), positions)
        layers = (f"{name}.encoder.layers.{i}" for i in range(fields["num_hidden_layers"]))
        self.blocks = nnx.List([Block(fields, dtype, layer) for layer in layers])
        self.norm = LayerNorm(size, eps, dtype, f"{name}.post_layernorm")

    def __call__(self, pixels: jax.Array, positions: jax.Array, frame: int) -> jax.Array:
        """pixels float32 [N, features], positions int32 [N] -> [N, hidden]. Each frame has this many patches
        and begins at a multiple of them, padding too.
        """
        x = self.embed(pixels.astype(self.dtype)) + self.positions.get_value()[positions]
        attend = within_frames(frame)
        for block in self.blocks:
            x = block(x, attend)
        return self.norm(x)
