"""SigLIP's encoder (Zhai et al. 2023), and the encoders of Gemma 3 and SmolVLM, which are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.models.layers import LayerNorm, NormSettings, RMSNorm, whole_matrix
from jengine.vision.parts import Attention, Linear, within_frames
from pallas_kernels.elementwise.activations import ACTIVATIONS


class Block(nnx.Module):
    def __init__(self, fields: Mapping[str, Any], dtype: jax.typing.DTypeLike, name: str) -> None:
        hidden, ffn = fields["hidden_size"], fields["intermediate_size"]
        norms = NormSettings(fields["layer_norm_eps"])
        self.heads, self.activation = fields["num_attention_heads"], fields["hidden_act"]
        self.norm1 = LayerNorm(hidden, norms, dtype, f"{name}.layer_norm1")
        self.q, self.k, self.v, self.out = (
            Linear(hidden, hidden, dtype, f"{name}.self_attn.{part}_proj") for part in ("q", "k", "v", "out")
        )
        self.norm2 = LayerNorm(hidden, norms, dtype, f"{name}.layer_norm2")
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
        frame: patches of a frame. Each frame begins at a multiple of them, padding too.
        name: the prefix of the tensors.
    """

    def __init__(self, fields: Mapping[str, Any], frame: int, dtype: jax.typing.DTypeLike, name: str) -> None:
        size, patch = fields["hidden_size"], fields["patch_size"]
        channels, place = fields.get("num_channels", 3), f"{name}.embeddings"
        table, filters = ((fields["image_size"] // patch) ** 2, size), (size, channels, patch, patch)
        self.dtype, self.frame = jnp.dtype(dtype), frame
        self.embed = Linear(channels * patch**2, size, dtype, f"{place}.patch_embedding", stored=filters)
        self.positions = whole_matrix(f"{place}.position_embedding.weight", dtype, *table, exact=True)
        layers = (f"{name}.encoder.layers.{i}" for i in range(fields["num_hidden_layers"]))
        self.blocks = nnx.List([Block(fields, dtype, layer) for layer in layers])
        self.norm = LayerNorm(size, NormSettings(fields["layer_norm_eps"]), dtype, f"{name}.post_layernorm")

    def __call__(self, pixels: jax.Array, places: jax.Array) -> jax.Array:
        """pixels float32 [N, features], places int32 [N, 1], of learned positions -> [N, hidden]. Each frame
        attends to itself, and padding to padding.
        """
        x = self.embed(pixels.astype(self.dtype)) + self.positions.get_value()[places[:, 0]]
        attend = within_frames(self.frame)
        for block in self.blocks:
            x = block(x, attend)
        return self.norm(x)


class Gemma3Encoder(nnx.Module):
    """Square images, whose patches are averaged."""

    def __init__(
        self, fields: Mapping[str, Any], hidden: int, patches_per_row: int, dtype: jax.typing.DTypeLike
    ) -> None:
        """hidden: of the text model."""
        size, place = fields["hidden_size"], "multi_modal_projector"
        norms = NormSettings(fields["layer_norm_eps"], norm_offset=1.0)
        self.patches_per_row = patches_per_row
        frame = (fields["image_size"] // fields["patch_size"]) ** 2
        self.siglip = Siglip(fields, frame, dtype, "vision_tower")
        self.mean_norm = RMSNorm(size, norms, dtype, f"{place}.mm_soft_emb_norm")
        projection = f"{place}.mm_input_projection_weight"
        self.projection = Linear(size, hidden, dtype, projection, biased=False, transposed=True)

    def __call__(self, pixels: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        """Embeddings of whole frames, see Vision.encode."""
        x = self.siglip(pixels, places)
        return self.projection(self.mean_norm(x.reshape(-1, self.patches_per_row, x.shape[1]).mean(1)))


class SmolVlmEncoder(nnx.Module):
    """Neighbouring patches become one row."""

    def __init__(self, fields: Mapping[str, Any], hidden: int, per_row: int, frame: int, dtype: Any) -> None:
        self.per_row, name = per_row, "connector.modality_projection.proj"
        self.siglip = Siglip(fields, frame, dtype, "vision_model")
        self.projection = Linear(fields["hidden_size"] * per_row, hidden, dtype, name, biased=False)

    def __call__(self, pixels: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        """Embeddings of whole frames, see Vision.encode."""
        x = self.siglip(pixels, places)
        return self.projection(x.reshape(len(x) // self.per_row, -1))
