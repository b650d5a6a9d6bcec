"""OLMoE: norms of queries and keys over all heads, experts in every layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import attention_biases, decoder
from jengine.models.layers import Block
from jengine.models.llama import Llama
from jengine.models.moe import Experts
from jengine.models.olmo import OlmoAttention
from pallas_kernels.qkv import Qkv, QkvProduct


class OlmoeAttention(OlmoAttention):
    def normalize(self, qkv: QkvProduct) -> Qkv:
        normed, limit = super().normalize(qkv), self.config.clip_qkv
        return normed if limit is None else Qkv(*(jnp.clip(x, -limit, limit) for x in normed))


class Olmoe(Llama):
    attention = OlmoeAttention

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return Experts(config, dtype, f"{name}.mlp")


def read_olmoe(hf: Fields) -> dict[str, Any]:
    fields, limit = decoder(hf), hf.get("clip_qkv")
    return {
        **fields,
        **attention_biases(hf),
        "clip_qkv": None if limit is None else float(limit),
        "expert_layers": tuple(range(fields["num_layers"])),
        "num_experts": int(hf.get("num_experts", 64)),
        "experts_per_token": int(hf.get("num_experts_per_tok", 8)),
        "expert_size": fields["intermediate_size"],
        "normalize_experts": bool(hf.get("norm_topk_prob", False)),
    }


FAMILIES = {
    "olmoe": Family("OLMoE", Olmoe, read_olmoe, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5})
}
