"""GLM-4.5, 4.6 and 4.7: partial rotation, DeepSeek V3's experts."""

from __future__ import annotations

from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.deepseek import AHEAD, DeepseekExperts, GroupRouting, corrected_experts
from jengine.models.family import Family, Fields
from jengine.models.hf_config import partly_rotated
from jengine.models.layers import Attention, Block, Layer, RMSNorm
from jengine.models.llama import Llama
from jengine.models.moe import MixtureOfExperts, has_experts
from jengine.models.qwen3 import Qwen3Attention


class Glm4Moe(Llama):
    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        return Layer(
            RMSNorm(config.hidden_size, config, dtype, f"{name}.input_layernorm"),
            (Qwen3Attention if config.qk_norm else Attention)(config, dtype, f"{name}.self_attn"),
            RMSNorm(config.hidden_size, config, dtype, f"{name}.post_attention_layernorm"),
            self.mlp(config, dtype, name, index),
        )

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        if not has_experts(config, index):
            return super().mlp(config, dtype, name, index)
        return DeepseekExperts(config, dtype, f"{name}.mlp")


def read_glm4_moe(hf: Fields) -> dict[str, Any]:
    return {
        **partly_rotated(hf, 0.5),
        "parts": corrected_experts(hf),
        "qkv_bias": bool(hf.get("attention_bias", False)),
        "qk_norm": bool(hf.get("use_qk_norm", False)),
    }


DEFAULTS = {
    **{
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
    },
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 1408},
}
PARTS = (MixtureOfExperts, GroupRouting)
FAMILIES = {
    "glm4_moe": Family("GLM-4.5, 4.6, 4.7", Glm4Moe, read_glm4_moe, DEFAULTS, skipped=AHEAD, parts=PARTS)
}
