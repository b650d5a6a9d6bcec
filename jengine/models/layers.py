"""What families share: parameters declared once, and the blocks built from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.config import ModelConfig
from jengine.models.rope import Rotation, rotate
from pallas_kernels.products import product
from pallas_kernels.quantized import Quantized, dequantize

Block = Callable[[jax.Array], jax.Array]  # a module [N, hidden] -> [N, hidden]
Weight = jax.Array | Quantized  # [*out, in]
Axes = tuple[str | None, ...]  # logical names, one for each axis; parallel/mesh.py says which are sharded
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,  # the one with tanh, under the name it had first
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class Attend(Protocol):
    """Causal attention over a layer's cache, after k and v have been written there."""

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> jax.Array:
        """q [N, heads, head_dim], k and v [N, kv_heads, head_dim] -> [N, heads, head_dim].

        Query head h reads kv head h // (heads / kv_heads). Scores are multiplied by scale; with soft_cap, s then
        becomes soft_cap * tanh(s / soft_cap); with window, a query at position p sees keys in (p - window, p].
        """


class Piece(NamedTuple):
    """Rows of a checkpoint's tensor, and the part of a parameter that they fill: `parameter[part]`, reshaped."""

    name: str
    shape: tuple[int, ...]  # in the checkpoint
    part: tuple[int | slice, ...] = ()
    rows: slice = slice(None)
    transposed: bool = False  # [in, out] in the checkpoint; rows are those of its transpose


Part = tuple[int, tuple[int | slice, ...]]  # a number of rows, and where they go
EVERY = slice(None)


def apart(names: Sequence[str], parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
    """A tensor [rows, *inputs] for each part."""
    return tuple(Piece(name, (rows, *inputs), part) for name, (rows, part) in zip(names, parts, strict=True))


def stacked(name: str, parts: Sequence[Part], *inputs: int, transposed: bool = False) -> tuple[Piece, ...]:
    """One tensor that holds the rows of all parts, in order; [*inputs, rows] if transposed."""
    ends = list(accumulate(rows for rows, _ in parts))
    shape = (*inputs, ends[-1]) if transposed else (ends[-1], *inputs)
    return tuple(Piece(name, shape, part, slice(end - rows, end), transposed) for (rows, part), end in zip(parts, ends, strict=True))


def param(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, axes: Axes, *source: Piece) -> nnx.Param[jax.Array]:
    """Declares a parameter: its abstract value, its logical axes and the tensors it is made of."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes, source=source, matrix=False)  # type: ignore[arg-type]


def matrix(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, axes: Axes, *source: Piece) -> nnx.Param[Any]:
    """Declares a parameter [*out, in] that is used by `dense` and `lookup` alone, which take it quantized too."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes, source=source, matrix=True)


def dense(x: jax.Array, weight: Weight, bias: jax.Array | None = None, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """x [N, in], weight [*out, in], bias [*out] -> [N, *out], in x's dtype or the given one."""
    y = product(x, flattened(weight), dtype).reshape(x.shape[0], *weight.shape[:-1])
    return y if bias is None else y + bias.astype(y.dtype)


def flattened(weight: Any) -> Any:
    """[*out, in] -> [outs, in]: a CPU's matrix product takes two axes as they lie; it would copy three."""
    if isinstance(weight, Quantized):
        return dataclasses.replace(weight, values=flattened(weight.values), scale=weight.scale.reshape(-1))
    return weight.reshape(-1, weight.shape[-1])


def lookup(table: Weight, rows: jax.Array) -> jax.Array:
    """table [n, size] at int32[N] -> [N, size]. Padding may ask for rows beyond the table."""
    taken: Weight = jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), table)
    return dequantize(taken) if isinstance(taken, Quantized) else taken


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis, computed in float32."""

    def __init__(self, size: int, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.weight = param((size,), dtype, (None,), Piece(f"{name}.weight", (size,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y *= lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * (self.weight[...].astype(jnp.float32) + self.offset)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Norm to mean 0 and variance 1 over the last axis, with weight and bias, computed in float32."""

    def __init__(self, size: int, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        self.eps = config.norm_eps
        self.weight = param((size,), dtype, (None,), Piece(f"{name}.weight", (size,)))
        self.bias = param((size,), dtype, (None,), Piece(f"{name}.bias", (size,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y -= jnp.mean(y, axis=-1, keepdims=True)
        y *= lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention. q, k and v are one product, laid out by kv head so that it shards without shuffling."""

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        self.config = config
        heads, kv_heads, dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        k, v, end = (dim * (config.group + i) for i in range(3))  # a kv head's rows: its queries, then k, then v
        rows = (heads * dim, slice(0, k)), (kv_heads * dim, slice(k, v)), (kv_heads * dim, slice(v, end))
        parts = [(count, (EVERY, where)) for count, where in rows]
        self.qkv = matrix((kv_heads, end, hidden), dtype, ("kv_heads", None, None), *self.qkv_source(name, "weight", parts, hidden))
        self.o = matrix((hidden, heads * dim), dtype, (None, "heads"), self.output_source(name, "weight", hidden, heads * dim))
        bias, output_bias = config.qkv_bias, config.output_bias
        self.qkv_bias = param((kv_heads, end), dtype, ("kv_heads", None), *self.qkv_source(name, "bias", parts)) if bias else None
        self.o_bias = param((hidden,), dtype, (None,), self.output_source(name, "bias", hidden)) if output_bias else None

    def qkv_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        """The checkpoint's weight or bias of queries, keys and values."""
        return apart([f"{name}.{p}_proj.{kind}" for p in "qkv"], parts, *inputs)

    def output_source(self, name: str, kind: str, *shape: int) -> Piece:
        """The checkpoint's weight or bias of the output."""
        return Piece(f"{name}.o_proj.{kind}", shape)

    def __call__(self, layer: int, x: jax.Array, rotation: Rotation | None, attend: Attend) -> jax.Array:
        """x [N, hidden] -> [N, hidden]; without a rotation, positions have entered elsewhere."""
        config = self.config
        tokens, kv_heads, group, dim = x.shape[0], config.num_kv_heads, config.group, config.head_dim
        qkv = dense(x, self.qkv[...], value(self.qkv_bias)).reshape(tokens, kv_heads, group + 2, dim)
        q, k, v = qkv[:, :, :group].reshape(tokens, kv_heads * group, dim), qkv[:, :, group], qkv[:, :, group + 1]
        q, k = self.normalize(q, k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        scale = dim**-0.5 if config.attention_scale is None else config.attention_scale
        y = attend(layer, q, k, v, scale=scale, window=config.window(layer), soft_cap=config.attention_soft_cap)
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
        parts: list[Part] = [(ffn, (EVERY, 0)), (ffn, (EVERY, 1))]
        self.gate_up = matrix((ffn, 2, hidden), dtype, ("ffn", None, None), *self.gate_up_source(name, "weight", parts, hidden))
        self.down = matrix((hidden, ffn), dtype, (None, "ffn"), Piece(f"{name}.down_proj.weight", (hidden, ffn)))
        bias = config.mlp_bias
        self.gate_up_bias = param((ffn, 2), dtype, ("ffn", None), *self.gate_up_source(name, "bias", parts)) if bias else None
        self.down_bias = param((hidden,), dtype, (None,), Piece(f"{name}.down_proj.bias", (hidden,))) if bias else None

    def gate_up_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        """The checkpoint's weight or bias of gate and up."""
        return apart([f"{name}.{part}_proj.{kind}" for part in ("gate", "up")], parts, *inputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = dense(x, self.gate_up[...], value(self.gate_up_bias))
        return dense(ACTIVATIONS[self.activation](gate_up[..., 0]) * gate_up[..., 1], self.down[...], value(self.down_bias))


class Mlp(nnx.Module):
    """down(activation(up(x))); [in, out] in the checkpoint if transposed."""

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, up: str, down: str, *, transposed: bool = False) -> None:
        self.activation = config.activation
        ffn, hidden = config.intermediate_size, config.hidden_size

        def weight(name: str, *shape: int) -> Piece:
            return Piece(f"{name}.weight", shape[::-1] if transposed else shape, transposed=transposed)

        self.up = matrix((ffn, hidden), dtype, ("ffn", None), weight(up, ffn, hidden))
        self.down = matrix((hidden, ffn), dtype, (None, "ffn"), weight(down, hidden, ffn))
        self.up_bias = param((ffn,), dtype, ("ffn",), Piece(f"{up}.bias", (ffn,))) if config.mlp_bias else None
        self.down_bias = param((hidden,), dtype, (None,), Piece(f"{down}.bias", (hidden,))) if config.mlp_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = ACTIVATIONS[self.activation](dense(x, self.up[...], value(self.up_bias)))
        return dense(y, self.down[...], value(self.down_bias))


class Layer(nnx.Module):
    """Attention and MLP, each on a normed input and added to the residual stream."""

    def __init__(self, attention_norm: Block, attention: Attention, mlp_norm: Block, mlp: Block) -> None:
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def __call__(self, layer: int, x: jax.Array, rotation: Rotation | None, attend: Attend) -> jax.Array:
        x = x + self.attention(layer, self.attention_norm(x), rotation, attend)
        return x + self.mlp(self.mlp_norm(x))


def value(parameter: nnx.Param[jax.Array] | None) -> jax.Array | None:
    """A parameter's array, where the model has it."""
    return None if parameter is None else parameter[...]
