"""Mixture of experts: Mixtral and Qwen3-MoE."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.config import ModelConfig
from jengine.models.layers import ACTIVATIONS, EVERY, Block, Piece, dense, param
from jengine.models.llama import Llama
from jengine.models.qwen3 import Qwen3

PRODUCT = lax.RaggedDotDimensionNumbers(  # x [rows, in] by weight [experts, out, in]
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def grouped_dense(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """x [N, in], whose first sizes[0] rows belong to weight[0] and so on; weight [experts, *out, in] -> [N, *out]."""
    flat = weight.reshape(weight.shape[0], -1, weight.shape[-1])
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = lax.ragged_dot_general(x, flat, sizes, PRODUCT, precision=precision, preferred_element_type=x.dtype)
    return y.reshape(x.shape[0], *weight.shape[1:-1])


class Experts(nnx.Module):
    """A weighted sum of the gated MLPs that a router picks for each token."""

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, parts: tuple[str, str, str]) -> None:
        """parts: the checkpoint's names of gate, up and down."""
        self.config = config
        experts, ffn, hidden = config.num_experts, config.expert_size, config.hidden_size
        gate_up, down = parts[:2], parts[2]

        def piece(expert: int, part: str, shape: tuple[int, int], *place: int | slice) -> Piece:
            return Piece(f"{name}.experts.{expert}.{part}.weight", shape, (expert, *place))

        every = range(experts)
        gates = (piece(e, part, (ffn, hidden), EVERY, i) for e in every for i, part in enumerate(gate_up))
        downs = (piece(e, down, (hidden, ffn)) for e in every)
        self.router = param((experts, hidden), dtype, (None, None), Piece(f"{name}.gate.weight", (experts, hidden)))
        self.gate_up = param((experts, ffn, 2, hidden), dtype, (None, "ffn", None, None), *gates)
        self.down = param((experts, hidden, ffn), dtype, (None, None, "ffn"), *downs)

    def __call__(self, x: jax.Array) -> jax.Array:
        k = self.config.experts_per_token
        weights, chosen = lax.top_k(jax.nn.softmax(dense(x, self.router[...], dtype=jnp.float32)), k)  # [N, k]
        if self.config.normalize_experts:
            weights /= weights.sum(-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1))  # of (token, choice), by expert
        sizes = jnp.bincount(chosen.reshape(-1), length=self.config.num_experts)
        gate_up = grouped_dense(x[order // k], self.gate_up[...], sizes)
        y = ACTIVATIONS[self.config.activation](gate_up[..., 0]) * gate_up[..., 1]
        y = grouped_dense(y, self.down[...], sizes)[jnp.argsort(order)].reshape(*chosen.shape, -1)
        return jnp.einsum("nkh,nk->nh", y, weights, precision=lax.Precision.HIGHEST).astype(x.dtype)


class Mixtral(Llama):
    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return Experts(config, dtype, f"{name}.block_sparse_moe", ("w1", "w3", "w2"))


class Qwen3Moe(Qwen3):
    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        if index not in config.expert_layers:
            return super().mlp(config, dtype, name, index)
        return Experts(config, dtype, f"{name}.mlp", ("gate_proj", "up_proj", "down_proj"))
