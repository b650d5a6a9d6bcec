"""DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import COMMON, Shapes, decoder, experts, gated, without

_LATENT = {
    **{**without(COMMON, "num_key_value_heads"), "vocab_size": 96},
    **{
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 12,
        "v_head_dim": 16,
    },
    **{
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "moe_intermediate_size": 24,
        "rms_norm_eps": 1e-5,
    },
    **{"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2},
}
_LONG = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_DEEPSEEK_V2 = {
    **{
        **_LATENT,
        "model_type": "deepseek_v2",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 4.0,
        "norm_topk_prob": False,
    },
    **{
        "topk_method": "group_limited_greedy",
        "rope_scaling": {**_LONG, "mscale": 0.707, "mscale_all_dim": 0.9},
    },
}
_DEEPSEEK_V3 = {
    **{
        **_LATENT,
        "model_type": "deepseek_v3",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    **{"rope_scaling": {**_LONG, "mscale": 1.0, "mscale_all_dim": 1.0}, "rope_interleave": True},
}
_GLM4_MOE_LITE = {
    **{
        **without(_LATENT, "first_k_dense_replace"),
        "model_type": "glm4_moe_lite",
        "n_group": 1,
        "topk_group": 1,
    },
    **{"routed_scaling_factor": 1.8, "norm_topk_prob": True, "n_shared_experts": 1, "num_hidden_layers": 2},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v2_lite": {
        **_DEEPSEEK_V2,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v3_ties": {**_DEEPSEEK_V3, "num_hidden_layers": 2, "rope_interleave": False},
    "glm4_moe_lite": _GLM4_MOE_LITE,
    "kimi_k2": {
        **_DEEPSEEK_V3,
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "num_hidden_layers": 2,
    },
}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, heads, rank = (config[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    key, rotary, value, query_rank = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    )
    products = {
        "kv_a_proj_with_mqa": (rank + rotary, hidden),
        "kv_b_proj": (heads * (key + value), rank),
        "o_proj": (hidden, heads * value),
    }
    norms = {"kv_a_layernorm": rank}
    if query_rank is None:
        products["q_proj"] = (heads * (key + rotary), hidden)
    else:
        products |= {"q_a_proj": (query_rank, hidden), "q_b_proj": (heads * (key + rotary), query_rank)}
        norms["q_a_layernorm"] = query_rank

    def layer(name: str, index: int) -> Shapes:
        found: Shapes = {f"{name}.self_attn.{part}.weight": shape for part, shape in products.items()}
        found |= {f"{name}.self_attn.{norm}.weight": (size,) for norm, size in norms.items()}
        if index < config.get("first_k_dense_replace", 1):
            return found | gated(f"{name}.mlp", hidden, config["intermediate_size"])
        size, count = config["moe_intermediate_size"], config["n_routed_experts"]
        found |= (
            {}
            if config["model_type"] == "deepseek_v2"
            else {f"{name}.mlp.gate.e_score_correction_bias": (count,)}
        )
        found |= gated(f"{name}.mlp.shared_experts", hidden, size * config["n_shared_experts"])
        return found | experts(f"{name}.mlp", count, hidden, size)

    return decoder(config, layer)
