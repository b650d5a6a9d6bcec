"""Qwen1.5-MoE and Qwen2 with experts."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, attention, decoder, experts, gated, linear

_QWEN2_MOE = {
    **{
        **SMALL,
        "model_type": "qwen2_moe",
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "moe_intermediate_size": 24,
    },
    **{"shared_expert_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 3},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": _QWEN2_MOE,
    "qwen2_moe_ties": {
        **{
            **_QWEN2_MOE,
            "mlp_only_layers": [],
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
        **{"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 2},
    },
}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, step = config["hidden_size"], config.get("decoder_sparse_step", 1)

    def layer(name: str, index: int) -> Shapes:
        found = attention(f"{name}.self_attn", config, bias=config.get("qkv_bias", True), output_bias=False)
        if index in config["mlp_only_layers"] or (index + 1) % step:
            return found | gated(f"{name}.mlp", hidden, config["intermediate_size"])
        found |= experts(f"{name}.mlp", config["num_experts"], hidden, config["moe_intermediate_size"])
        shared = gated(f"{name}.mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
        return found | shared | linear(f"{name}.mlp.shared_expert_gate", 1, hidden)

    return decoder(config, layer)
