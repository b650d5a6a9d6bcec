"""Qwen3: Llama with norms of queries and keys per head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import attention_biases, decoder
from jengine.models.layers import Attention, RMSNorm
from jengine.models.llama import Llama, qwen_windows
from pallas_kernels.cache.qkv import HeadNorm, QkvProduct


class Qwen3Attention(Attention):
    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        super().__init__(config, dtype, name)
        self.q_norm = RMSNorm(config.head_dim, config, dtype, f"{name}.q_norm")
        self.k_norm = RMSNorm(config.head_dim, config, dtype, f"{name}.k_norm")

    def normalize(self, qkv: QkvProduct) -> QkvProduct:
        q, k = self.q_norm, self.k_norm
        return replace(qkv, norm=HeadNorm(q.weight[...], k.weight[...], q.eps, q.offset))


class Qwen3(Llama):
    attention = Qwen3Attention


def read_qwen3(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), **qwen_windows(hf), **attention_biases(hf)}


FAMILIES = {"qwen3": Family("Qwen3", Qwen3, read_qwen3)}
