"""Phi-3.5-MoE."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, W, attention, decoder, experts, layer_norm

_PHIMOE = {
    **{
        **SMALL,
        "model_type": "phimoe",
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    **{"router_jitter_noise": 0.3, "attention_bias": True, "lm_head_bias": True, "sliding_window": 250},
}
_LONG = {"type": "longrope", "original_max_position_embeddings": 64, "short_mscale": 0.9, "long_mscale": 1.2}
_FACTORS = [1.0, 1.05, 1.1, 1.2, 1.4, 1.5, 1.8, 2.0]

VARIANTS: dict[str, dict[str, Any]] = {
    "phimoe": _PHIMOE,
    "phimoe_ties": {
        **_PHIMOE,
        "sliding_window": 30,
        "attention_bias": False,
        "lm_head_bias": False,
        "router_jitter_noise": 0.01,
    },
    "phimoe_longrope_inside": {
        **_PHIMOE,
        "rope_scaling": {
            **_LONG,
            "short_factor": _FACTORS,
            "long_factor": [2 * factor for factor in _FACTORS],
        },
    },
    # transformers takes short_factor for any length, unlike the published code: with equal factors they agree
    "phimoe_longrope_beyond": {
        **_PHIMOE,
        "rope_scaling": {**_LONG, "short_factor": _FACTORS, "long_factor": _FACTORS},
    },
}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]

    def layer(name: str, index: int) -> Shapes:
        mixer = attention(f"{name}.self_attn", config, bias=config["attention_bias"])
        return mixer | experts(f"{name}.block_sparse_moe", config["num_local_experts"], hidden, ffn, parts=W)

    return decoder(config, layer, norm=layer_norm, head_bias=config["lm_head_bias"])
