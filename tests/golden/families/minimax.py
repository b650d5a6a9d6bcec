"""MiniMax-M2."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, W, attention, decoder, experts, norms_of_all_heads

_MINIMAX_M2 = {
    **{
        **SMALL,
        "model_type": "minimax_m2",
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "head_dim": 16,
    },
    **{
        "rotary_dim": 8,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "attn_type_list": [1, 1],
        "scoring_func": "sigmoid",
    },
}

VARIANTS: dict[str, dict[str, Any]] = {"minimax_m2": _MINIMAX_M2}


def shapes(config: dict[str, Any]) -> Shapes:
    count = config["num_local_experts"]

    def layer(name: str, index: int) -> Shapes:
        found = attention(f"{name}.self_attn", config) | norms_of_all_heads(f"{name}.self_attn", config)
        found |= {f"{name}.block_sparse_moe.e_score_correction_bias": (count,)}
        return found | experts(
            f"{name}.block_sparse_moe", count, config["hidden_size"], config["intermediate_size"], parts=W
        )

    return decoder(config, layer)
