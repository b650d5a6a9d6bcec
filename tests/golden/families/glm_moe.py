"""GLM-4.5, 4.6 and 4.7."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import MOE, SMALL, Shapes, attention, decoder, experts, gated, head_norms

_GLM4_MOE = {
    **{
        **SMALL,
        **MOE,
        "model_type": "glm4_moe",
        "head_dim": 20,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    **{
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
    },
}

VARIANTS: dict[str, dict[str, Any]] = {"glm4_moe": _GLM4_MOE}


def shapes(config: dict[str, Any]) -> Shapes:
    """All layers but the first one have experts."""
    hidden, ffn, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]

    def layer(name: str, index: int) -> Shapes:
        found = attention(f"{name}.self_attn", config, bias=True, output_bias=False) | head_norms(
            f"{name}.self_attn", config["head_dim"]
        )
        if not index:
            return found | gated(f"{name}.mlp", hidden, config["intermediate_size"])
        found |= {f"{name}.mlp.gate.e_score_correction_bias": (count,)} | experts(
            f"{name}.mlp", count, hidden, ffn
        )
        return found | gated(f"{name}.mlp.shared_experts", hidden, ffn * config["n_shared_experts"])

    return decoder(config, layer)
