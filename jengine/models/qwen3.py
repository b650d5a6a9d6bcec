"""Qwen3: Llama with queries and keys normed head by head."""

from __future__ import annotations

import jax

from jengine.config import ModelConfig
from jengine.models.layers import Attention, RMSNorm
from jengine.models.llama import Llama


class Qwen3Attention(Attention):
    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        super().__init__(config, dtype, name)
        self.q_norm = RMSNorm(config.head_dim, config, dtype, f"{name}.q_norm")
        self.k_norm = RMSNorm(config.head_dim, config, dtype, f"{name}.k_norm")

    def normalize(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.q_norm(q), self.k_norm(k)


class Qwen3(Llama):
    attention = Qwen3Attention
