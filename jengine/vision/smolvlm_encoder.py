"""The encoder of SmolVLM and Idefics3, see `vision.smolvlm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.models.layers import dense, exact_matrix, param
from jengine.models.pieces import Piece
from pallas_kernels.activations import ACTIVATIONS


class Linear(nnx.Module):
    def __init__(self, name: str, outputs: int, inputs: int, dtype: Any, *, bias: bool = True) -> None:
        shape = outputs, inputs
        self.weight = exact_matrix(shape, dtype, (None, None), Piece(f"{name}.weight", shape))
        self.bias = param((outputs,), dtype, (None,), Piece(f"{name}.bias", (outputs,))) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return dense(x, self.weight[...], None if self.bias is None else self.bias[...])


class Norm(nnx.Module):
    def __init__(self, name: str, size: int, eps: float, dtype: Any) -> None:
        self.eps = eps
        self.weight = param((size,), dtype, (None,), Piece(f"{name}.weight", (size,)))
        self.bias = param((size,), dtype, (None,), Piece(f"{name}.bias", (size,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y -= jnp.mean(y, axis=-1, keepdims=True)
        y *= lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class EncoderLayer(nnx.Module):
    def __init__(self, name: str, fields: Mapping[str, Any], dtype: Any) -> None:
        size, inner = fields["hidden_size"], fields["intermediate_size"]
        self.heads, self.activation = fields["num_attention_heads"], fields["hidden_act"]
        eps = fields["layer_norm_eps"]
        self.norm1 = Norm(f"{name}.layer_norm1", size, eps, dtype)
        self.norm2 = Norm(f"{name}.layer_norm2", size, eps, dtype)
        q, k, v, out = (f"{name}.self_attn.{part}_proj" for part in ("q", "k", "v", "out"))
        self.q, self.k, self.v = (Linear(part, size, size, dtype) for part in (q, k, v))
        self.out = Linear(out, size, size, dtype)
        self.up = Linear(f"{name}.mlp.fc1", inner, size, dtype)
        self.down = Linear(f"{name}.mlp.fc2", size, inner, dtype)

    def __call__(self, x: jax.Array, frame: int) -> jax.Array:
        y = self.norm1(x)
        split = (-1, frame, self.heads, x.shape[-1] // self.heads)
        q, k, v = (part(y).reshape(split) for part in (self.q, self.k, self.v))
        x += self.out(lax.map(_attend, (q, k, v)).reshape(x.shape))
        return x + self.down(ACTIVATIONS[self.activation](self.up(self.norm2(x))))


def _attend(qkv: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """Attention within a frame: [patches, heads, dim] each -> the same."""
    q, k, v = qkv
    how: Any = {
        "preferred_element_type": jnp.float32,
        "precision": lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
    }
    scores = jnp.einsum("qhd,khd->hqk", q, k, **how) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("hqk,khd->qhd", weights, v, **how).astype(q.dtype)


class Encoder(nnx.Module):
    """pixels float32 [N, features], positions int32 [N] -> [N / per_row, hidden]."""

    def __init__(self, fields: Mapping[str, Any], hidden: int, per_row: int, dtype: Any) -> None:
        size, patch, name = fields["hidden_size"], fields["patch_size"], "vision_model"
        channels, side = fields["num_channels"], fields["image_size"] // patch
        self.dtype, self.per_row = jnp.dtype(dtype), per_row
        filters, inputs = (size, channels, patch, patch), channels * patch**2
        embeddings = f"{name}.embeddings"
        self.patches = param(
            filters, dtype, (None,) * 4, Piece(f"{embeddings}.patch_embedding.weight", filters)
        )
        self.bias = param((size,), dtype, (None,), Piece(f"{embeddings}.patch_embedding.bias", (size,)))
        table, self.inputs = (side**2, size), inputs
        self.positions = param(
            table, dtype, (None, None), Piece(f"{embeddings}.position_embedding.weight", table)
        )
        layers = (f"{name}.encoder.layers.{index}" for index in range(fields["num_hidden_layers"]))
        self.layers = nnx.List([EncoderLayer(layer, fields, dtype) for layer in layers])
        self.norm = Norm(f"{name}.post_layernorm", size, fields["layer_norm_eps"], dtype)
        projection = "connector.modality_projection.proj"
        self.projection = Linear(projection, hidden, size * per_row, dtype, bias=False)

    def __call__(self, pixels: jax.Array, positions: jax.Array, frame: int) -> jax.Array:
        precision = lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        filters = self.patches[...].reshape(-1, self.inputs)
        x = jnp.dot(pixels.astype(self.dtype), filters.T, precision=precision)
        x += self.bias[...] + self.positions[...][positions]
        for layer in self.layers:
            x = layer(x, frame)
        return self.projection(self.norm(x).reshape(len(x) // self.per_row, -1))
