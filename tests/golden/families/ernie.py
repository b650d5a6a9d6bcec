"""ERNIE 4.5."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import MOE, SMALL, Shapes, attention, decoder, experts, gated

_ERNIE = {**SMALL, "model_type": "ernie4_5", "head_dim": 16, "use_bias": True, "rope_theta": 500000.0}
_ERNIE_MOE = {
    **{
        **SMALL,
        **MOE,
        "model_type": "ernie4_5_moe",
        "use_bias": False,
        "moe_k": 3,
        "moe_num_experts": 6,
        "moe_num_shared_experts": 2,
    },
    **{
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "tie_word_embeddings": True,
    },
}

VARIANTS: dict[str, dict[str, Any]] = {"ernie4_5": _ERNIE, "ernie4_5_moe": _ERNIE_MOE}


def shapes(config: dict[str, Any]) -> Shapes:
    """With experts, all layers but the first one have some."""
    hidden, count, bias = config["hidden_size"], config.get("moe_num_experts"), config["use_bias"]

    def layer(name: str, index: int) -> Shapes:
        found = attention(f"{name}.self_attn", config, bias=bias)
        if not count or not index:
            return found | gated(f"{name}.mlp", hidden, config["intermediate_size"], bias)
        ffn = config["moe_intermediate_size"]
        found |= {f"{name}.mlp.moe_statics.e_score_correction_bias": (1, count)} | experts(
            f"{name}.mlp", count, hidden, ffn
        )
        return found | gated(f"{name}.mlp.shared_experts", hidden, ffn * config["moe_num_shared_experts"])

    return decoder(config, layer)
