"""Mixture of experts: Mixtral and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import attention_biases, decoder, window_everywhere
from jengine.models.layers import Block, dense, matrix, param, value
from jengine.models.llama import Llama
from jengine.models.pieces import EVERY, Piece
from jengine.models.qwen3 import Qwen3
from jengine.parallel.collectives import all_reduce, shard_index
from pallas_kernels.activations import gated
from pallas_kernels.hadamard import transform
from pallas_kernels.int4 import Int4
from pallas_kernels.products import Weight
from pallas_kernels.quantized import Quantized, dequantize, quantize

PRODUCT = lax.RaggedDotDimensionNumbers(  # x [rows, in] by weight [experts, out, in]
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
MAX_BLOCK = 64  # rows


class Experts(nnx.Module):
    """A weighted sum of the gated MLPs that a router picks for each token."""

    gate_up_bias: nnx.Param[jax.Array] | None = None
    down_bias: nnx.Param[jax.Array] | None = None

    def __init__(
        self,
        config: ModelConfig,
        dtype: jax.typing.DTypeLike,
        name: str,
        parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        """parts: the checkpoint's names of gate, up and down."""
        self.config, self.parts = config, parts
        self.declare(dtype, name)

    def declare(self, dtype: jax.typing.DTypeLike, name: str) -> None:
        """The parameters, and the checkpoint's tensors that they are made of."""
        config = self.config
        experts, ffn, hidden = config.num_experts, config.expert_size, config.hidden_size
        laid, real = config.padded(ffn), slice(0, ffn)
        gate_up, down = self.parts[:2], self.parts[2]

        def piece(expert: int, part: str, shape: tuple[int, int], *place: int | slice) -> Piece:
            return Piece(f"{name}.experts.{expert}.{part}.weight", shape, (expert, *place))

        every = range(experts)
        gates = (piece(e, part, (ffn, hidden), real, i) for e in every for i, part in enumerate(gate_up))
        downs = (piece(e, down, (hidden, ffn), EVERY, real) for e in every)
        self.router = param((experts, hidden), dtype, (None, None), Piece(f"{name}.gate.weight", (experts, hidden)))
        self.gate_up = matrix((experts, laid, 2, hidden), dtype, (None, "ffn", None, None), *gates)
        self.down = matrix((experts, hidden, laid), dtype, (None, None, "ffn"), *downs)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each token's experts int32 [N, k], and what their results are multiplied by, float32 [N, k]: the latter first."""
        weights, chosen = lax.top_k(jax.nn.softmax(dense(x, self.router[...], dtype=jnp.float32)), self.config.experts_per_token)
        if self.config.normalize_experts:
            weights /= weights.sum(-1, keepdims=True)
        return weights, chosen

    def gate(self, gate_up: jax.Array) -> jax.Array:
        """[rows, size, 2] -> [rows, size]."""
        return gated(gate_up, self.config.activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        return all_reduce(self.own_part(x))

    def own_part(self, x: jax.Array) -> jax.Array:
        """What this device's part of each expert gives; the sum over devices is the result."""
        weights, chosen = self.route(x)
        params = self.gate_up[...], self.down[...], value(self.gate_up_bias)
        rows = jnp.repeat(x, chosen.shape[1], axis=0)
        y = lax.platform_dependent(rows, chosen.reshape(-1), *params, cpu=self.by_block, default=self.by_ragged_dot)
        y = _weighted(y.reshape(*chosen.shape, -1), weights)
        if self.down_bias is not None:  # on one device, since results are summed
            bias = _weighted(self.down_bias[...][chosen], weights)
            y += jnp.where(jnp.equal(shard_index(), 0), bias, 0)
        return y.astype(x.dtype)

    def by_ragged_dot(self, x: jax.Array, chosen: jax.Array, gate_up: Weight, down: Weight, bias: jax.Array | None = None) -> jax.Array:
        """Row i of x [rows, hidden] through expert chosen[i]: one product over rows in the experts' order."""
        sizes, rank = _counted(chosen, self.config.num_experts)
        place = (jnp.cumsum(sizes) - sizes)[chosen] + rank
        owners = jnp.zeros_like(chosen).at[place].set(chosen)

        def product(rows: jax.Array, weight: Any) -> jax.Array:
            weight = dequantize(weight) if isinstance(weight, Int4) else weight
            values, scale = weight, None
            if isinstance(weight, Quantized):  # no ragged product takes eight bits: they are converted as they are read
                values, scale = weight.values.astype(rows.dtype), weight.scale[owners]
                if weight.inputs:
                    rows = dequantize(quantize(transform(rows, weight.hadamard), weight.kind)).astype(rows.dtype)
            precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
            flat = values.reshape(values.shape[0], -1, values.shape[-1])
            y = lax.ragged_dot_general(rows, flat, sizes, PRODUCT, precision=precision, preferred_element_type=rows.dtype)
            y = y.reshape(rows.shape[0], *weight.shape[1:-1])
            return y if scale is None else (y * scale).astype(rows.dtype)

        y = product(jnp.zeros_like(x).at[place].set(x), gate_up)
        return product(self.gate(y if bias is None else y + bias[owners].astype(y.dtype)), down)[place]

    def by_block(self, x: jax.Array, chosen: jax.Array, gate_up: Weight, down: Weight, bias: jax.Array | None = None) -> jax.Array:
        """The same in blocks of rows that share an expert: on a CPU, ragged_dot copies all weights and multiplies by all of them."""
        experts, (rows, hidden) = self.config.num_experts, x.shape
        block = min(8 * -(-rows // (8 * experts)), MAX_BLOCK)
        sizes, rank = _counted(chosen, experts)
        blocks = -(-sizes // block)
        ends = jnp.cumsum(blocks)
        count = min(experts, rows) + rows // block  # as many as there can be
        place = (ends - blocks)[chosen] * block + rank
        padded = jnp.zeros((count * block, hidden), x.dtype).at[place].set(x)

        def one(args: tuple[jax.Array, jax.Array]) -> jax.Array:
            expert, rows = args
            return dense(self.gate(dense(rows, gate_up[expert], None if bias is None else bias[expert])), down[expert])

        owners = jnp.minimum(jnp.searchsorted(ends, jnp.arange(count), side="right"), experts - 1)
        y: jax.Array = lax.map(one, (owners, padded.reshape(count, block, hidden)))
        return y.reshape(-1, hidden)[place]


def _weighted(y: jax.Array, weights: jax.Array) -> jax.Array:
    """y [N, k, hidden], weights [N, k] -> [N, hidden]."""
    return jnp.einsum("nkh,nk->nh", y.astype(jnp.float32), weights, precision=lax.Precision.HIGHEST)


def _counted(chosen: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """How many rows chose each expert, and each row's rank among those of its expert."""
    hits = jax.nn.one_hot(chosen, experts, dtype=jnp.int32)  # [rows, experts]
    return hits.sum(0), ((jnp.cumsum(hits, axis=0) - 1) * hits).sum(-1)


class Mixtral(Llama):
    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return Experts(config, dtype, f"{name}.block_sparse_moe", ("w1", "w3", "w2"))


class Qwen3Moe(Qwen3):
    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        if index not in config.expert_layers:
            return super().mlp(config, dtype, name, index)
        return Experts(config, dtype, f"{name}.mlp")


def read_mixtral(hf: Fields) -> dict[str, Any]:
    fields = {**decoder(hf), **window_everywhere(hf, hf.get("sliding_window"))}
    return {
        **fields,
        "expert_layers": tuple(range(fields["num_layers"])),
        "num_experts": int(hf.get("num_local_experts") or hf.get("num_experts", 8)),
        "experts_per_token": int(hf.get("num_experts_per_tok", 2)),
        "expert_size": fields["intermediate_size"],
        "normalize_experts": True,
    }


def read_qwen3_moe(hf: Fields) -> dict[str, Any]:
    window = hf.get("sliding_window", 4096)
    fields = {**decoder(hf), **attention_biases(hf), **window_everywhere(hf, window if hf.get("use_sliding_window") else None)}
    dense, step = hf.get("mlp_only_layers") or [], int(hf.get("decoder_sparse_step", 1))
    return {
        **fields,
        "expert_layers": tuple(i for i in range(fields["num_layers"]) if i not in dense and (i + 1) % step == 0),
        "num_experts": int(hf.get("num_experts") or hf.get("num_local_experts", 128)),
        "experts_per_token": int(hf.get("num_experts_per_tok", 8)),
        "expert_size": int(hf.get("moe_intermediate_size", 768)),
        "normalize_experts": bool(hf.get("norm_topk_prob", False)),
    }


FAMILIES = {
    "mixtral": Family("Mixtral", Mixtral, read_mixtral, {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6}),
    "qwen3_moe": Family("Qwen3-MoE", Qwen3Moe, read_qwen3_moe),
}
