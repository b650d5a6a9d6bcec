"""Building blocks of model families: parameter declarations and modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.models.cache import TOKENS, CacheEntry, PageArray, Queries
from jengine.models.config import ModelConfig
from jengine.models.facts import Working
from jengine.models.pieces import EVERY, Part, Piece, apart, by_heads, qkv_parts
from jengine.parallel.collectives import all_reduce, shard_index, shards
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.qkv import Qkv, QkvProduct, QueriesOnly
from pallas_kernels.elementwise.activations import ACTIVATIONS
from pallas_kernels.elementwise.norm import rms_norm
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.products.rows import Gated, Normed, Rows, Sum, array_of
from pallas_kernels.products.weight import Weight
from pallas_kernels.products.weights import weight_of

Block = Callable[[jax.Array], jax.Array]  # a module [N, hidden] -> [N, hidden]
Stream = jax.Array | Sum  # the residual stream [N, hidden], whose last sum the next product may compute
GATED, GATED_W = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")  # gate, up, down
Axes = tuple[str | None, ...]  # a logical name per axis; parallel/mesh.py defines which are sharded


class Attend(Protocol):
    """Causal attention over a layer's cache. It first norms and rotates queries and keys, and writes keys and
    values to the cache.
    """

    def __call__(
        self,
        layer: int,
        qkv: Qkv | QkvProduct | QueriesOnly,
        rotation: Rotation | None,
        options: AttentionOptions,
    ) -> jax.Array:
        """Attention of N tokens -> [N, heads, head_dim], for this device's heads.

        Args:
            rotation: rotates queries and keys; None: no rotation.
            options: of the scores; arrays are those of this device's heads.
        """


class Recur(Attend, Protocol):
    """`Attend` for models with layers that have a recurrent state."""

    def convolve(self, layer: int, x: jax.Array, weight: jax.Array) -> jax.Array:
        """A causal convolution of each channel: x [N, channels], weight [channels, taps] -> float32 [N,
        channels].

        The last tap multiplies the token itself, the others the previous tokens of its sequence, or zeros
        before the first.
        """

    def recur(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, rate: jax.Array | None
    ) -> jax.Array:
        """The gated delta rule or, without a rate, linear attention; see `pallas_kernels.recurrence`.

        q and k [N, key heads, key_dim], v [N, heads, value_dim], decay and rate [N, heads], all float32 ->
        [N, heads, value_dim]. Value head h uses key head h // (heads / key heads).
        """


class Mixer(Protocol):
    """The part of a layer that mixes tokens: attention, or a recurrence."""

    def __call__(self, layer: int, x: jax.Array, rotation: Rotation | None, attend: Attend) -> jax.Array:
        """x [N, hidden] -> [N, hidden]."""

    def cache(self, layer: int) -> CacheEntry:
        """What it keeps in the cache as a part of this layer."""


def param(
    shape: tuple[int, ...], dtype: jax.typing.DTypeLike, axes: Axes, *source: Piece, multiplies: bool = False
) -> nnx.Param[jax.Array]:
    """Declares an array: its abstract value, its logical axes and its checkpoint tensors.

    Args:
        multiplies: whether a family's own code uses it as a matrix, so that it counts as one.
    """
    value: Any = jax.ShapeDtypeStruct(shape, dtype)
    return nnx.Param(value, axes=axes, source=source, multiplies=multiplies)


class Matrix(nnx.Param[Any]):
    """A parameter that is read as a `Weight`: `self.down[...]`. Only `dense`, lookups and experts use it."""

    def __getitem__(self, index: Any) -> Weight:  # type: ignore[override]
        weight = weight_of(self.get_value())
        return weight if index is Ellipsis else weight[index]


def matrix(
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    axes: Axes,
    *source: Piece,
    exact: bool = False,
    adaptable: bool | None = None,
) -> Matrix:
    """Declares a weight [*out, in], or a table of vectors.

    Args:
        exact: it is never quantized, as a router's.
        adaptable: whether LoRA adapters may change it; None: unless it is exact.
    """
    value = jax.ShapeDtypeStruct(shape, dtype)
    adaptable = not exact if adaptable is None else adaptable
    return Matrix(value, axes=axes, source=source, multiplies=True, exact=exact, adaptable=adaptable)


def whole_matrix(name: str, dtype: jax.typing.DTypeLike, *shape: int, exact: bool = False) -> Matrix:
    """Declares a tensor of the checkpoint that each device has whole. exact: as in `matrix`."""
    return matrix(shape, dtype, (None,) * len(shape), Piece(name, shape), exact=exact)


def dense(
    x: Rows, weight: Weight, bias: jax.Array | None = None, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Multiplies x [N, in] by weight [*out, in] and adds bias [*out] -> [N, *out], in x's dtype or the given
    one.
    """
    y = weight.product(x, dtype)
    if bias is not None:
        y += bias.reshape(-1).astype(y.dtype)  # on two axes, which cuBLASLt fuses
    return y.reshape(x.shape[0], *weight.shape[:-1])


def row_parallel_dense(x: jax.Array, weight: Weight, bias: jax.Array | None = None) -> jax.Array:
    """`dense` over inputs that are sharded: each device multiplies its own, and the results are summed."""
    y = all_reduce(dense(x, weight))
    return y if bias is None else y + bias.astype(y.dtype)


def vocabulary(config: ModelConfig, size: int, dtype: jax.typing.DTypeLike, name: str) -> Matrix:
    """Declares a vector per token, for `embed` or an output head, sharded by tokens."""
    table, place = (config.vocab_size, size), (slice(0, config.vocab_size),)
    return matrix((config.padded(config.vocab_size), size), dtype, ("vocab", None), Piece(name, table, place))


def embed(table: Weight, tokens: jax.Array) -> jax.Array:
    """The vectors [N, size] of tokens int32[N]. Each device looks up the tokens of its shard, and the results
    are summed.
    """
    if shards() == 1:
        return table.take(tokens)
    local = tokens - shard_index() * table.shape[0]
    return all_reduce(jnp.where(((local >= 0) & (local < table.shape[0]))[:, None], table.take(local), 0))


def with_images(x: jax.Array, attend: Attend) -> jax.Array:
    """Embeddings of tokens [N, hidden], with those of images, or that prompts give, in the place of tokens
    that stand for them.
    """
    visual = getattr(attend, "visual", None)
    if visual is None:
        return x
    return jnp.where(visual.here[:, None], visual.rows[:, : x.shape[1]].astype(x.dtype), x)


def unit(x: jax.Array, eps: float) -> jax.Array:
    """A root mean square norm without a weight."""
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class NormSettings(NamedTuple):
    """What norms take of a configuration."""

    norm_eps: float
    norm_offset: float = 0.0  # added to the weight


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis, computed in float32."""

    def __init__(
        self, size: int, config: ModelConfig | NormSettings, dtype: jax.typing.DTypeLike, name: str
    ) -> None:
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.weight = param((size,), dtype, (None,), Piece(f"{name}.weight", (size,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps, self.offset)


def standardized(x: jax.Array, eps: float) -> jax.Array:
    """x with mean 0 and variance 1 over the last axis, in float32."""
    y = x.astype(jnp.float32)
    y -= jnp.mean(y, axis=-1, keepdims=True)
    return y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)


class LayerNorm(nnx.Module):
    """Norm to mean 0 and variance 1 over the last axis, with a weight and, in most families, a bias, computed
    in float32.
    """

    biased = True

    def __init__(
        self, size: int, config: ModelConfig | NormSettings, dtype: jax.typing.DTypeLike, name: str
    ) -> None:
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.weight = param((size,), dtype, (None,), Piece(f"{name}.weight", (size,)))
        self.bias = param((size,), dtype, (None,), Piece(f"{name}.bias", (size,))) if self.biased else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = standardized(x, self.eps)
        y *= self.weight[...].astype(jnp.float32) + self.offset
        return (y if self.bias is None else y + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention. One product computes q, k and v; its layout by kv head shards without
    reordering.
    """

    qkv_bias: nnx.Param[jax.Array] | None = None
    o_bias: nnx.Param[jax.Array] | None = None
    takes_norm = True  # x may be a norm, which its product computes
    slopes = False  # whether `options` have slopes
    reads: int | None = None  # the layer whose keys and values it attends to; None: its own
    width = 1  # of x, in hidden sizes
    output_name = "o_proj"  # in the checkpoint

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        self.config = config
        laid, dim, hidden = config.num_kv_heads_padded, config.head_dim, config.hidden_size
        rows, parts = self.layout(config)
        inputs = self.width * hidden
        self.qkv = matrix(
            (laid, rows, inputs),
            dtype,
            ("kv_heads", None, None),
            *self.qkv_source(name, "weight", parts, inputs),
        )
        output = self.output_source(name, "weight", hidden, config.num_heads * dim)
        self.o = matrix(
            (hidden, laid * config.group_size_padded * dim), dtype, (None, "heads"), *by_heads(config, output)
        )
        if config.qkv_bias:
            biases = self.qkv_source(name, "bias", parts)
            self.qkv_bias = param((laid, rows), dtype, ("kv_heads", None), *biases)
        if config.output_bias:
            self.o_bias = param((hidden,), dtype, (None,), self.output_source(name, "bias", hidden))

    def layout(self, config: ModelConfig) -> tuple[int, tuple[Part, ...]]:
        """The number of rows per kv head, and the places of the checkpoint's rows of queries, keys and
        values.
        """
        return config.head_dim * (config.group_size_padded + 2), qkv_parts(config)

    def qkv_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        """The checkpoint tensors of the weight or bias of queries, keys and values."""
        return apart([f"{name}.{p}_proj.{kind}" for p in "qkv"[: len(parts)]], parts, *inputs)

    def output_source(self, name: str, kind: str, *shape: int) -> Piece:
        """The checkpoint tensor of the weight or bias of the output."""
        return Piece(f"{name}.{self.output_name}.{kind}", shape)

    def __call__(self, layer: int, x: Rows, rotation: Rotation | None, attend: Attend) -> jax.Array:
        """x [N, width * hidden] -> [N, hidden]. rotation is None if queries and keys do not rotate."""
        config = self.config
        tokens = x.shape[0]
        kv_heads = self.qkv[...].shape[0]
        group = config.group_size_padded
        dim = config.head_dim
        rows = dense(x, self.qkv[...], value(self.qkv_bias)).reshape(tokens, kv_heads, -1, dim)
        reads, qkv = layer if self.reads is None else self.reads, self.normalize(QkvProduct(rows, group))
        y = attend(reads, qkv, rotation, self.options(layer))
        return row_parallel_dense(
            self.finish(y, rows[:, :, group + 2 :]).reshape(tokens, -1), self.o[...], value(self.o_bias)
        )

    def options(self, layer: int) -> AttentionOptions:
        """What scores in a layer have beside queries and keys."""
        config, scale = self.config, self.config.attention_scale
        scale = config.head_dim**-0.5 if scale is None else scale
        return AttentionOptions(scale, window=config.window(layer), soft_cap=config.attention_soft_cap)

    def cache(self, layer: int) -> CacheEntry:
        """Keys and values of each token, or of the last ones."""
        config = self.config
        dim, window, kv_heads = config.head_dim, config.window(layer), config.num_kv_heads_padded
        heads = kv_heads // config.shards * config.group_size_padded
        return CacheEntry(
            kind="full" if window is None else "window",
            arrays=(PageArray((kv_heads, TOKENS, dim)),) * 2,
            operations=4 * config.num_heads * dim,
            channels=6 * (heads + 2 * kv_heads // config.shards) * dim,
            window=window,
            queries=Queries(heads=heads, dim=dim, soft_cap=config.attention_soft_cap, slopes=self.slopes),
            reads=self.reads,
        )

    def finish(self, y: jax.Array, rest: jax.Array) -> jax.Array:
        """A family's change to attention's result [N, heads, head_dim]. rest: the product's other rows, [N,
        kv_heads, n, head_dim].
        """
        return y

    def normalize(self, qkv: QkvProduct) -> Qkv | QkvProduct | QueriesOnly:
        """A family's changes to queries and keys before they are rotated. On GPUs, a HeadNorm needs no
        separate kernel.
        """
        return qkv


class GatedMlp(nnx.Module):
    """down(activation(gate(x)) * up(x)), with gate and up in one product.

    Rows of gate and up alternate, [ffn, 2, hidden], so the product has two axes and shards without
    reordering.
    """

    gate_up_bias: nnx.Param[jax.Array] | None = None
    down_bias: nnx.Param[jax.Array] | None = None
    takes_norm = True

    def __init__(
        self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, names: tuple[str, ...] = GATED
    ) -> None:
        """`names` are the checkpoint's names of gate, up and down."""
        self.activation, self.names, down = config.activation, names, f"{name}.{names[-1]}"
        ffn, hidden = config.intermediate_size, config.hidden_size
        laid, real = config.padded(ffn), slice(0, ffn)
        self.own_size = laid // config.shards
        parts = [Part(ffn, ((real, (real, i)),)) for i in range(2)]
        self.gate_up = matrix(
            (laid, 2, hidden), dtype, ("ffn", None, None), *self.gate_up_source(name, "weight", parts, hidden)
        )
        self.down = matrix(
            (hidden, laid), dtype, (None, "ffn"), Piece(f"{down}.weight", (hidden, ffn), (EVERY, real))
        )
        if config.mlp_bias:
            biases = self.gate_up_source(name, "bias", parts)
            self.gate_up_bias = param((laid, 2), dtype, ("ffn", None), *biases)
            self.down_bias = param((hidden,), dtype, (None,), Piece(f"{down}.bias", (hidden,)))

    def gate_up_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        """The checkpoint tensors of the weight or bias of gate and up."""
        return apart([f"{name}.{part}.{kind}" for part in self.names[:2]], parts, *inputs)

    def __call__(self, x: Rows) -> jax.Array:
        y = all_reduce(self.own_part(x))
        return y if self.down_bias is None else y + self.down_bias[...].astype(y.dtype)

    def working(self, tokens: int) -> Working:
        return Working(channels=4 * self.own_size)

    def own_part(self, x: Rows) -> jax.Array:
        """The partial result of this device's rows, without the last bias. The sum over devices is the
        result.
        """
        return dense(
            Gated(dense(x, self.gate_up[...], value(self.gate_up_bias)), self.activation), self.down[...]
        )


class Mlp(nnx.Module):
    """down(activation(up(x))). If transposed, the checkpoint stores weights as [in, out]."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: jax.typing.DTypeLike,
        up: str,
        down: str,
        *,
        transposed: bool = False,
    ) -> None:
        self.activation = config.activation
        ffn, hidden = config.intermediate_size, config.hidden_size
        laid, real = config.padded(ffn), slice(0, ffn)
        self.own_size = laid // config.shards

        def weight(name: str, shape: tuple[int, int], *place: slice) -> Piece:
            return Piece(f"{name}.weight", shape[::-1] if transposed else shape, place, transposed=transposed)

        self.up = matrix((laid, hidden), dtype, ("ffn", None), weight(up, (ffn, hidden), real))
        self.down = matrix((hidden, laid), dtype, (None, "ffn"), weight(down, (hidden, ffn), EVERY, real))
        self.up_bias = (
            param((laid,), dtype, ("ffn",), Piece(f"{up}.bias", (ffn,), (real,))) if config.mlp_bias else None
        )
        self.down_bias = (
            param((hidden,), dtype, (None,), Piece(f"{down}.bias", (hidden,))) if config.mlp_bias else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = ACTIVATIONS[self.activation](dense(x, self.up[...], value(self.up_bias)))
        return row_parallel_dense(y, self.down[...], value(self.down_bias))

    def working(self, tokens: int) -> Working:
        return Working(channels=4 * self.own_size)


class Layer(nnx.Module):
    """Attention and MLP, each with a norm on its input and added to the residual stream."""

    def __init__(self, attention_norm: Block, attention: Mixer, mlp_norm: Block, mlp: Block) -> None:
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def __call__(self, layer: int, x: Stream, rotation: Rotation | None, attend: Attend) -> Stream:
        x = Sum(x, self.attention(layer, normed(self.attention_norm, x, self.attention), rotation, attend))
        return Sum(x, self.mlp(normed(self.mlp_norm, x, self.mlp)))


def normed(norm: Block, x: Stream, then: object) -> Any:
    """The norm of x; left to the product of the block that follows if this block can do so."""
    if type(norm) is RMSNorm and getattr(then, "takes_norm", False):
        return Normed(x, norm.weight[...], norm.eps, norm.offset)
    return norm(array_of(x))


def value(parameter: nnx.Param[jax.Array] | None) -> jax.Array | None:
    """A parameter's array, or None if the model does not have the parameter."""
    return None if parameter is None else parameter[...]
