"""Configurations of tiny models of families with experts and caches of their own kinds: see variants.py."""

from __future__ import annotations

from typing import Any

from tests.golden.more_variants import COMMON

_BASE = {**COMMON, "vocab_size": 96}
_GPT_OSS = {
    **_BASE,
    "model_type": "gpt_oss",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 30,
    "swiglu_limit": 1.5,
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
        **{"beta_fast": 32.0, "beta_slow": 1.0},
    },
}

_LATENT = {
    **{name: value for name, value in _BASE.items() if name != "num_key_value_heads"},
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
    **_LATENT,
    **{
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
    **_LATENT,
    **{
        "model_type": "deepseek_v3",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    **{"rope_scaling": {**_LONG, "mscale": 1.0, "mscale_all_dim": 1.0}, "rope_interleave": True},
}
_GLM4_MOE_LITE = {
    **{name: value for name, value in _LATENT.items() if name != "first_k_dense_replace"},
    **{
        "model_type": "glm4_moe_lite",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
    },
    **{"n_shared_experts": 1, "num_hidden_layers": 2},
}

EXPERT_VARIANTS: dict[str, dict[str, Any]] = {
    "gpt_oss": _GPT_OSS,
    "gpt_oss_wide_sinks": {
        **_GPT_OSS,
        "sliding_window": 250,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
    },
    "gpt_oss_ties": {**_GPT_OSS, "num_hidden_layers": 2},
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
