"""Mixtral and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import Shapes, W, attention, decoder, experts, gated, head_norms
from tests.golden.families.llama import PLAIN
from tests.golden.families.qwen3 import QWEN3

_MIXTRAL = {
    **{**PLAIN, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "intermediate_size": 48},
    **{"num_local_experts": 4, "num_experts_per_tok": 2},
}
_QWEN3_MOE = {
    **{
        **QWEN3,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": 40,
    },
    **{"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe_mixed": {
        **_QWEN3_MOE,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
    },
}
ALL_LENGTHS = tuple(VARIANTS)


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]

    def layer(name: str, index: int) -> Shapes:
        projections = attention(f"{name}.self_attn", config, bias=config.get("attention_bias", False))
        if config["model_type"] == "mixtral":
            return projections | experts(
                f"{name}.block_sparse_moe", config["num_local_experts"], hidden, ffn, parts=W
            )
        norms = head_norms(f"{name}.self_attn", config["head_dim"])
        if index in config.get("mlp_only_layers", []):
            return projections | norms | gated(f"{name}.mlp", hidden, ffn)
        return (
            projections
            | norms
            | experts(f"{name}.mlp", config["num_experts"], hidden, config["moe_intermediate_size"])
        )

    return decoder(config, layer)
