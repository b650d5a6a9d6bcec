"""Mixture of experts: Mixtral and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import attention_biases, decoder, window_everywhere
from jengine.models.layers import Block, dense, exact_matrix, matrix, value
from jengine.models.llama import Llama
from jengine.models.pieces import EVERY, Piece
from jengine.models.qwen3 import Qwen3
from jengine.parallel.collectives import all_reduce, shard_index
from pallas_kernels.activations import gated
from pallas_kernels.devices import traced_for
from pallas_kernels.groups import counted, grouped
from pallas_kernels.product_dispatch import grouped_product
from pallas_kernels.products import Weight

MAX_BLOCK = 64  # maximum rows per block


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
        """`parts` are the checkpoint's names of gate, up and down."""
        self.config, self.parts = config, parts
        self.declare(dtype, name)

    def declare(self, dtype: jax.typing.DTypeLike, name: str) -> None:
        """Declares the parameters and their checkpoint tensors."""
        config = self.config
        experts, ffn, hidden = config.num_experts, config.expert_size, config.hidden_size
        laid, real = config.padded(ffn), slice(0, ffn)
        gate_up, down = self.parts[:2], self.parts[2]

        def piece(expert: int, part: str, shape: tuple[int, int], *place: int | slice) -> Piece:
            return Piece(f"{name}.experts.{expert}.{part}.weight", shape, (expert, *place))

        every = range(experts)
        gates = (piece(e, part, (ffn, hidden), real, i) for e in every for i, part in enumerate(gate_up))
        downs = (piece(e, down, (hidden, ffn), EVERY, real) for e in every)
        self.router = exact_matrix(
            (experts, hidden), dtype, (None, None), Piece(f"{name}.gate.weight", (experts, hidden))
        )
        self.gate_up = matrix((experts, laid, 2, hidden), dtype, (None, "ffn", None, None), *gates)
        self.down = matrix((experts, hidden, laid), dtype, (None, None, "ffn"), *downs)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weights of each token's experts, float32 [N, k], and the experts, int32 [N, k]."""
        weights, chosen = lax.top_k(
            jax.nn.softmax(dense(x, self.router[...], dtype=jnp.float32)), self.config.experts_per_token
        )
        if self.config.normalize_experts:
            weights /= weights.sum(-1, keepdims=True)
        return weights, chosen

    def entering(self, x: jax.Array) -> jax.Array:
        """The experts' input, computed from the router's."""
        return x

    def gate(self, gate_up: jax.Array) -> jax.Array:
        """[rows, size, 2] -> [rows, size]."""
        return gated(gate_up, self.config.activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        return all_reduce(self.own_part(x))

    def own_part(self, x: jax.Array) -> jax.Array:
        """The partial result of this device's part of each expert. The sum over devices is the result."""
        weights, chosen = self.route(x)
        x = self.entering(x)
        params = self.gate_up[...], self.down[...], value(self.gate_up_bias)
        y = _weighted(
            lax.platform_dependent(x, chosen, *params, cpu=self.by_block, default=self.by_group), weights
        )
        if self.down_bias is not None:  # added on one device, because results are summed
            bias = _weighted(self.down_bias[...][chosen], weights)
            y += jnp.where(jnp.equal(shard_index(), 0), bias, 0)
        return y.astype(x.dtype)

    def by_group(
        self, x: jax.Array, chosen: jax.Array, gate_up: Weight, down: Weight, bias: jax.Array | None = None
    ) -> jax.Array:
        """Applies experts chosen [rows, k] to x [rows, hidden] -> [rows, k, hidden]. Sorts rows by expert."""
        k, device = chosen.shape[1], traced_for()
        groups = grouped(chosen.reshape(-1), self.config.num_experts)
        y = grouped_product(x[groups.row // k], gate_up, groups, device=device)
        inner = self.gate(y if bias is None else y + bias[groups.owner].astype(y.dtype))
        return grouped_product(inner, down, groups, device=device)[groups.place].reshape(*chosen.shape, -1)

    def by_block(
        self, x: jax.Array, chosen: jax.Array, gate_up: Weight, down: Weight, bias: jax.Array | None = None
    ) -> jax.Array:
        """The same in blocks of rows that share an expert. On a CPU, ragged_dot copies all weights and
        multiplies by all of them.
        """
        experts, (rows, k), hidden = self.config.num_experts, chosen.shape, x.shape[1]
        rows *= k
        block = min(8 * -(-rows // (8 * experts)), MAX_BLOCK)
        sizes, rank = counted(chosen.reshape(-1), experts)
        blocks = -(-sizes // block)
        ends = jnp.cumsum(blocks)
        count = min(experts, rows) + rows // block  # maximum number of blocks
        place = (ends - blocks)[chosen.reshape(-1)] * block + rank
        padded = jnp.zeros((count * block, hidden), x.dtype).at[place].set(jnp.repeat(x, k, axis=0))

        def one(args: tuple[jax.Array, jax.Array]) -> jax.Array:
            expert, rows = args
            return dense(
                self.gate(dense(rows, gate_up[expert], None if bias is None else bias[expert])), down[expert]
            )

        owners = jnp.minimum(jnp.searchsorted(ends, jnp.arange(count), side="right"), experts - 1)
        y: jax.Array = lax.map(one, (owners, padded.reshape(count, block, hidden)))
        return y.reshape(-1, hidden)[place].reshape(*chosen.shape, hidden)


def _weighted(y: jax.Array, weights: jax.Array) -> jax.Array:
    """y [N, k, hidden], weights [N, k] -> float32 [N, hidden]. A GPU gathers, multiplies and adds in one
    kernel.
    """
    return (y.astype(jnp.float32) * weights[..., None]).sum(1)


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
    fields = {
        **decoder(hf),
        **attention_biases(hf),
        **window_everywhere(hf, window if hf.get("use_sliding_window") else None),
    }
    return {
        **fields,
        "expert_layers": sparse_layers(hf),
        "num_experts": int(hf.get("num_experts") or hf.get("num_local_experts", 128)),
        "experts_per_token": int(hf.get("num_experts_per_tok", 8)),
        "expert_size": int(hf.get("moe_intermediate_size", 768)),
        "normalize_experts": bool(hf.get("norm_topk_prob", False)),
    }


def sparse_layers(hf: Fields) -> tuple[int, ...]:
    """The layers with experts, in Qwen's models."""
    dense, step = hf.get("mlp_only_layers") or [], int(hf.get("decoder_sparse_step", 1))
    return tuple(i for i in range(int(hf["num_hidden_layers"])) if i not in dense and (i + 1) % step == 0)


FAMILIES = {
    "mixtral": Family(
        "Mixtral",
        Mixtral,
        read_mixtral,
        {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    "qwen3_moe": Family("Qwen3-MoE", Qwen3Moe, read_qwen3_moe),
}
