"""Granite 3 with experts."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, attention, decoder

_GRANITE_MOE = {
    **{
        **SMALL,
        "model_type": "granitemoe",
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
    },
    **{
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
}

VARIANTS: dict[str, dict[str, Any]] = {
    "granitemoe": _GRANITE_MOE,
    "granitemoe_ties": {**_GRANITE_MOE, "attention_bias": True},
}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, ffn, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]

    def layer(name: str, index: int) -> Shapes:
        stacked = {
            "input_linear": (count, 2 * ffn, hidden),
            "output_linear": (count, hidden, ffn),
            "router.layer": (count, hidden),
        }
        projections = attention(f"{name}.self_attn", config, bias=config.get("attention_bias", False))
        return projections | {
            f"{name}.block_sparse_moe.{part}.weight": shape for part, shape in stacked.items()
        }

    return decoder(config, layer)
