"""OLMoE: norms of queries and keys over all heads, experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import attention_biases, decoder
from jengine.models.layers import Block
from jengine.models.llama import Llama
from jengine.models.moe import Experts, MixtureOfExperts
from jengine.models.olmo import OlmoAttention
from pallas_kernels.cache.qkv import Qkv, QkvProduct


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedQkv:
    """The largest absolute value of queries, keys and values."""

    limit: float


class OlmoeAttention(OlmoAttention):
    def normalize(self, qkv: QkvProduct) -> Qkv:
        normed, clipped = super().normalize(qkv), self.config.find(ClippedQkv)
        return (
            normed if clipped is None else Qkv(*(jnp.clip(x, -clipped.limit, clipped.limit) for x in normed))
        )


class Olmoe(Llama):
    attention = OlmoeAttention

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return Experts(config, dtype, f"{name}.mlp")


def read_olmoe(hf: Fields) -> dict[str, Any]:
    fields, limit = decoder(hf), hf.get("clip_qkv")
    experts = MixtureOfExperts(
        layers=tuple(range(fields["num_layers"])),
        count=int(hf.get("num_experts", 64)),
        per_token=int(hf.get("num_experts_per_tok", 8)),
        size=fields["intermediate_size"],
        normalize=bool(hf.get("norm_topk_prob", False)),
    )
    clipped = () if limit is None else (ClippedQkv(limit=float(limit)),)
    return {**fields, **attention_biases(hf), "parts": (experts, *clipped)}


DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
FAMILIES = {"olmoe": Family("OLMoE", Olmoe, read_olmoe, DEFAULTS, parts=(MixtureOfExperts, ClippedQkv))}
