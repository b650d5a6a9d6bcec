"""What families share: parameters declared once, and the blocks built from them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.config import ModelConfig
from jengine.models.rope import rotate

Axes = tuple[str | None, ...]  # logical names, one for each axis; parallel/mesh.py says which are sharded
ACTIVATIONS = {"silu": jax.nn.silu}


class Attend(Protocol):
    """Causal attention over a layer's cache, after k and v have been written there."""

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float) -> jax.Array:
        """q [N, heads, head_dim], k and v [N, kv_heads, head_dim] -> [N, heads, head_dim].

        Query head h reads kv head h // (heads / kv_heads); scores are multiplied by scale.
        """


class Piece(NamedTuple):
    """A checkpoint's tensor, and the part of a parameter that it fills: `parameter[part]`, reshaped."""

    name: str
    shape: tuple[int, ...]  # in the checkpoint
    part: tuple[int | slice, ...] = ()


def param(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, axes: Axes, *source: Piece) -> nnx.Param[jax.Array]:
    """Declares a parameter: its abstract value, its logical axes and the tensors it is made of."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes, source=source)  # type: ignore[arg-type]


def dense(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """x [N, in], weight [*out, in], bias [*out] -> [N, *out], in x's dtype or the given one."""
    flat = weight.reshape(-1, weight.shape[-1])  # a CPU's matrix product takes two axes as they lie; it would copy three
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # or GPUs multiply float32 as tf32
    y = lax.dot_general(x, flat, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=dtype or x.dtype)
    y = y.reshape(x.shape[0], *weight.shape[:-1])
    return y if bias is None else y + bias.astype(y.dtype)


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis, computed in float32."""

    def __init__(self, size: int, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        self.eps = config.norm_eps
        self.weight = param((size,), dtype, (None,), Piece(f"{name}.weight", (size,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y *= lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention. q, k and v are one product, laid out by kv head so that it shards without shuffling."""

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        self.config = config
        heads, kv_heads, dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        k, v, end = (dim * (config.group + i) for i in range(3))  # a kv head's rows: its queries, then k, then v
        parts = {"q": (heads, slice(0, k)), "k": (kv_heads, slice(k, v)), "v": (kv_heads, slice(v, end))}

        def fused(kind: str, *inputs: int) -> tuple[Piece, ...]:
            every = slice(None)
            return tuple(Piece(f"{name}.{p}_proj.{kind}", (n * dim, *inputs), (every, rows)) for p, (n, rows) in parts.items())

        self.qkv = param((kv_heads, end, hidden), dtype, ("kv_heads", None, None), *fused("weight", hidden))
        self.o = param((hidden, heads * dim), dtype, (None, "heads"), Piece(f"{name}.o_proj.weight", (hidden, heads * dim)))
        self.qkv_bias = param((kv_heads, end), dtype, ("kv_heads", None), *fused("bias")) if config.attention_bias else None
        self.o_bias = param((hidden,), dtype, (None,), Piece(f"{name}.o_proj.bias", (hidden,))) if config.attention_bias else None

    def __call__(self, layer: int, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend) -> jax.Array:
        """x [N, hidden], cos and sin [N, 1, head_dim / 2] -> [N, hidden]."""
        tokens, kv_heads, group, dim = x.shape[0], self.config.num_kv_heads, self.config.group, self.config.head_dim
        qkv = dense(x, self.qkv[...], value(self.qkv_bias)).reshape(tokens, kv_heads, group + 2, dim)
        q, k, v = qkv[:, :, :group].reshape(tokens, kv_heads * group, dim), qkv[:, :, group], qkv[:, :, group + 1]
        q, k = self.normalize(q, k)
        y = attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v, scale=dim**-0.5)
        return dense(y.reshape(tokens, -1), self.o[...], value(self.o_bias))

    def normalize(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What a family does to queries and keys before they are rotated."""
        return q, k


class GatedMlp(nnx.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product.

    Their rows alternate, [ffn, 2, hidden], so that the product has two axes and still shards without shuffling.
    """

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        self.activation = config.activation
        ffn, hidden = config.intermediate_size, config.hidden_size

        def fused(kind: str, *inputs: int) -> tuple[Piece, ...]:
            return tuple(Piece(f"{name}.{part}_proj.{kind}", (ffn, *inputs), (slice(None), i)) for i, part in enumerate(("gate", "up")))

        self.gate_up = param((ffn, 2, hidden), dtype, ("ffn", None, None), *fused("weight", hidden))
        self.down = param((hidden, ffn), dtype, (None, "ffn"), Piece(f"{name}.down_proj.weight", (hidden, ffn)))
        self.gate_up_bias = param((ffn, 2), dtype, ("ffn", None), *fused("bias")) if config.mlp_bias else None
        self.down_bias = param((hidden,), dtype, (None,), Piece(f"{name}.down_proj.bias", (hidden,))) if config.mlp_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = dense(x, self.gate_up[...], value(self.gate_up_bias))
        return dense(ACTIVATIONS[self.activation](gate_up[..., 0]) * gate_up[..., 1], self.down[...], value(self.down_bias))


def value(parameter: nnx.Param[jax.Array] | None) -> jax.Array | None:
    """A parameter's array, where the model has it."""
    return None if parameter is None else parameter[...]
