"""The encoder of Gemma 3: SigLIP over square images, whose patches are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.models.layers import exact_matrix
from jengine.models.pieces import Piece
from jengine.vision.parts import Attention, LayerNorm, Linear, RMSNorm, within_frames
from pallas_kernels.activations import ACTIVATIONS


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


class Encoder(nnx.Module):
    def __init__(
        self, fields: Mapping[str, Any], hidden: int, patches_per_row: int, dtype: jax.typing.DTypeLike
    ) -> None:
        """hidden: of the text model."""
        size, patch, eps = fields["hidden_size"], fields["patch_size"], fields["layer_norm_eps"]
        self.patches_per_row, name = patches_per_row, "vision_tower.vision_model"
        table, filters = ((fields["image_size"] // patch) ** 2, size), (size, 3, patch, patch)
        place, dtype = f"{name}.embeddings", jnp.dtype(dtype)
        self.frame, self.dtype = table[0], dtype
        self.embed = Linear(3 * patch**2, size, dtype, f"{place}.patch_embedding", stored=filters)
        positions = Piece(f"{place}.position_embedding.weight", table)
        self.positions = exact_matrix(table, dtype, (None, None), positions)
        layers = (f"{name}.encoder.layers.{i}" for i in range(fields["num_hidden_layers"]))
        self.blocks = nnx.List([Block(fields, dtype, layer) for layer in layers])
        self.norm = LayerNorm(size, eps, dtype, f"{name}.post_layernorm")
        place = "multi_modal_projector"
        self.mean_norm = RMSNorm(size, eps, dtype, f"{place}.mm_soft_emb_norm", offset=1.0)
        projection = f"{place}.mm_input_projection_weight"
        self.projection = Linear(size, hidden, dtype, projection, biased=False, transposed=True)

    def __call__(self, pixels: jax.Array, places: jax.Array) -> jax.Array:
        """As Vision.encode; bucket and images are whole frames."""
        x = self.embed(pixels.astype(self.dtype)) + self.positions.get_value()[places[:, 0]]
        for block in self.blocks:
            x = block(x, within_frames(self.frame))
        pooled = self.norm(x).reshape(-1, self.patches_per_row, x.shape[1]).mean(1)
        return self.projection(self.mean_norm(pooled))
