"""OLMoE."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, attention, decoder, experts, norms_of_all_heads

_OLMOE = {**SMALL, "model_type": "olmoe", "intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}

VARIANTS: dict[str, dict[str, Any]] = {
    "olmoe": _OLMOE,
    "olmoe_ties": {**_OLMOE, "clip_qkv": 0.8, "attention_bias": True, "norm_topk_prob": True},
}


def shapes(config: dict[str, Any]) -> Shapes:
    def layer(name: str, index: int) -> Shapes:
        mixer = attention(f"{name}.self_attn", config, bias=config.get("attention_bias", False))
        mixer |= norms_of_all_heads(f"{name}.self_attn", config)
        return mixer | experts(
            f"{name}.mlp", config["num_experts"], config["hidden_size"], config["intermediate_size"]
        )

    return decoder(config, layer)
