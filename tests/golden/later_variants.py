"""Configurations of the tiny models of Cohere, MiniMax-Text-01 and other families with experts: see
variants.py.
"""

from __future__ import annotations

from typing import Any

from tests.golden.more_variants import COMMON

_BASE = {**COMMON, "vocab_size": 64, "intermediate_size": 112, "num_hidden_layers": 2}
_FULL, _WINDOW, _LINEAR = "full_attention", "sliding_attention", "linear_attention"

_COHERE = {
    **_BASE,
    "model_type": "cohere",
    "logit_scale": 0.25,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_COHERE2 = {
    **{
        **_COHERE,
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "sliding_window": 30,
        "sliding_window_pattern": 4,
    },
    **{"logit_scale": 0.3},
}
_GRANITE_MOE = {
    **{
        **_BASE,
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
_MINIMAX = {
    **{
        **_BASE,
        "model_type": "minimax",
        "num_hidden_layers": 4,
        "head_dim": 24,
        "block_size": 32,
        "intermediate_size": 24,
    },
    **{"num_local_experts": 6, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    **{
        "full_attn_alpha_factor": 2.0,
        "full_attn_beta_factor": 0.7,
        "linear_attn_alpha_factor": 0.8,
        "linear_attn_beta_factor": 1.5,
    },
    **{"mlp_alpha_factor": 1.3, "mlp_beta_factor": 0.6},
}
_UNSCALED = {name: 1.0 for name in _MINIMAX if name.endswith("_factor")}
_OLMOE = {**_BASE, "model_type": "olmoe", "intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}
_PHIMOE = {
    **{
        **_BASE,
        "model_type": "phimoe",
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    **{"router_jitter_noise": 0.3, "attention_bias": True, "lm_head_bias": True, "sliding_window": 250},
}
_PHIMOE_LONG = {
    "type": "longrope",
    "original_max_position_embeddings": 64,
    "short_mscale": 0.9,
    "long_mscale": 1.2,
}
_FACTORS = [1.0, 1.05, 1.1, 1.2, 1.4, 1.5, 1.8, 2.0]
_QWEN2_MOE = {
    **{
        **_BASE,
        "model_type": "qwen2_moe",
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "moe_intermediate_size": 24,
    },
    **{"shared_expert_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 3},
}

LATER_VARIANTS: dict[str, dict[str, Any]] = {
    "cohere": _COHERE,
    "cohere_norms": {**_COHERE, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
    "cohere2": _COHERE2,
    "cohere2_wide": {
        **_COHERE2,
        "sliding_window": 250,
        "num_hidden_layers": 2,
        "layer_types": [_FULL, _WINDOW],
        "attention_bias": True,
    },
    "granitemoe": _GRANITE_MOE,
    "granitemoe_ties": {**_GRANITE_MOE, "attention_bias": True},
    "minimax": _MINIMAX,
    "minimax_ties": {
        **{
            **_MINIMAX,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "block_size": 256,
        },
        "layer_types": [_LINEAR, _LINEAR, _FULL],
    },
    # transformers knows these two as minimax: their factors under both names
    "minimax_m1": {
        **{
            **_MINIMAX,
            "model_type": "minimax_m1",
            "num_hidden_layers": 2,
            "layer_types": [_LINEAR, _FULL],
            "attn_type_list": [0, 1],
        },
        **{
            "layernorm_full_attention_alpha": 2.0,
            "layernorm_full_attention_beta": 0.7,
            "postnorm": True,
            "shared_intermediate_size": 0,
        },
        **{"layernorm_linear_attention_alpha": 0.8, "layernorm_linear_attention_beta": 1.5},
        **{"layernorm_mlp_alpha": 1.3, "layernorm_mlp_beta": 0.6},
    },
    "minimax_text_01": {
        **{
            **_MINIMAX,
            **_UNSCALED,
            "model_type": "minimax_text_01",
            "num_hidden_layers": 2,
            "layer_types": [_LINEAR, _FULL],
        },
        **{"attn_type_list": [0, 1], "postnorm": True},
    },
    "olmoe": _OLMOE,
    "olmoe_ties": {**_OLMOE, "clip_qkv": 0.8, "attention_bias": True, "norm_topk_prob": True},
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
            **_PHIMOE_LONG,
            "short_factor": _FACTORS,
            "long_factor": [2 * factor for factor in _FACTORS],
        },
    },
    # transformers takes short_factor for any length, unlike the published code: with equal factors they agree
    "phimoe_longrope_beyond": {
        **_PHIMOE,
        "rope_scaling": {**_PHIMOE_LONG, "short_factor": _FACTORS, "long_factor": _FACTORS},
    },
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
