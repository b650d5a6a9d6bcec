"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 with experts and a shared expert, whose result is multiplied by a
gate.
"""

from __future__ import annotations

from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import decoder, windows_by_layer_types
from jengine.models.layers import Block
from jengine.models.llama import Llama
from jengine.models.moe import MixtureOfExperts, has_experts, sparse_layers
from jengine.models.qwen3_next import SharedExperts


class Qwen2Moe(Llama):
    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        if not has_experts(config, index):
            return super().mlp(config, dtype, name, index)
        return SharedExperts(config, dtype, f"{name}.mlp", ("gate_proj", "up_proj", "down_proj"))


def read_qwen2_moe(hf: Fields) -> dict[str, Any]:
    layers, last = int(hf["num_hidden_layers"]), int(hf.get("max_window_layers", 28))
    window = hf.get("sliding_window", 4096)  # present in configurations that do not use it
    types = ["full_attention" if i % 2 or i >= last else "sliding_attention" for i in range(layers)]
    experts = MixtureOfExperts(
        layers=sparse_layers(hf),
        count=int(hf.get("num_experts", 60)),
        per_token=int(hf.get("num_experts_per_tok", 4)),
        size=int(hf.get("moe_intermediate_size", 1408)),
        shared_size=int(hf.get("shared_expert_intermediate_size", 5632)),
        normalize=bool(hf.get("norm_topk_prob", False)),
    )
    return {
        **decoder(hf),
        **windows_by_layer_types(hf, window if hf.get("use_sliding_window") else None, types),
        "qkv_bias": bool(hf.get("qkv_bias", True)),
        "parts": (experts,),
    }


FAMILIES = {
    "qwen2_moe": Family(
        "Qwen1.5-MoE, Qwen2 with experts",
        Qwen2Moe,
        read_qwen2_moe,
        {"max_position_embeddings": 32768},
        parts=(MixtureOfExperts,),
    )
}
