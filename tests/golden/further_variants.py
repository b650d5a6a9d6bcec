"""Configurations of the tiny models of families that came later, recorded for fewer prompts: see
variants.py.
"""

from __future__ import annotations

from typing import Any

from tests.golden.more_variants import COMMON

_BASE = {**COMMON, "vocab_size": 64, "intermediate_size": 112, "num_hidden_layers": 2}


def _types(*kinds: str) -> list[str]:
    return [f"{kind}_attention" for kind in kinds]


_GEMMA4 = {
    **{name: value for name, value in _BASE.items() if name != "rope_theta"},
    **{
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 7,
        "sliding_window": 30,
    },
    **{
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "intermediate_size": 48,
        "hidden_size_per_layer_input": 12,
    },
    **{
        "vocab_size_per_layer_input": 64,
        "tie_word_embeddings": True,
        "attention_k_eq_v": False,
        "pad_token_id": 0,
    },
    "layer_types": _types("sliding", "full", "sliding", "sliding", "sliding", "sliding", "full"),
}
_GEMMA4_EXPERTS = {
    **{
        **_GEMMA4,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
    },
    **{
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 1.0,
    },
    **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24},
    "layer_types": _types("sliding", "sliding", "full", "full"),
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000.0},
    },
}
_GEMMA4_VISION = {
    **{
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    **{"num_key_value_heads": 2, "head_dim": 16},
}
_GEMMA3N = {
    **{
        **_BASE,
        "model_type": "gemma3n_text",
        "head_dim": 16,
        "num_hidden_layers": 6,
        "sliding_window": 30,
        "num_kv_shared_layers": 2,
    },
    **{
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 50,
        "tie_word_embeddings": True,
        "intermediate_size": 48,
    },
    **{
        "altup_num_inputs": 3,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.7, 0.7, 0.0, 0.0, 0.0, 0.0],
    },
    **{
        "layer_types": _types("sliding", "full", "sliding", "full", "sliding", "full"),
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    **{"final_logit_softcapping": 2.0, "pad_token_id": 0},
}
_GEMMA3N_VISION = {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc", "hidden_size": 32}
_MOE = {"num_hidden_layers": 3, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
_GLM4_MOE = {
    **{
        **_BASE,
        **_MOE,
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
_MINIMAX_M2 = {
    **{
        **_BASE,
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
_EXAONE4 = {**_BASE, "model_type": "exaone4", "head_dim": 24, "num_hidden_layers": 4, "sliding_window": 30}
_ERNIE = {**_BASE, "model_type": "ernie4_5", "head_dim": 16, "use_bias": True, "rope_theta": 500000.0}
_ERNIE_MOE = {
    **{
        **_BASE,
        **_MOE,
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
_NEMOTRON = {
    **_BASE,
    "model_type": "nemotron",
    "hidden_act": "relu2",
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "mlp_bias": True,
}
_LFM2 = {
    **{
        **_BASE,
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "conv_bias": False,
        "pad_token_id": 0,
    },
    **{"block_auto_adjust_ff_dim": True, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.1},
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}
_LLAMA4 = {
    **{
        **_BASE,
        "model_type": "llama4_text",
        "head_dim": 16,
        "num_hidden_layers": 3,
        "intermediate_size": 24,
        "intermediate_size_mlp": 96,
    },
    **{
        "num_local_experts": 6,
        "num_experts_per_tok": 1,
        "moe_layers": [1, 2],
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 256,
    },
    **{"floor_scale": 20, "attn_scale": 0.3, "use_qk_norm": True, "pad_token_id": 0},
}
_LLAMA4_VISION = {
    **{
        "model_type": "llama4_vision_model",
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    **{
        "image_size": 56,
        "patch_size": 14,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
}
_BARE = {name: COMMON[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype")} | {
    "vocab_size": 64
}
_GPTJ = {
    **{
        **_BARE,
        "model_type": "gptj",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "rotary_dim": 8,
        "n_inner": 112,
    },
    **{"activation_function": "gelu_new", "tie_word_embeddings": False},
}
_BLOOM = {
    **_BARE,
    "model_type": "bloom",
    "hidden_size": 72,
    "n_layer": 2,
    "n_head": 6,
    "seq_length": 256,
    "tie_word_embeddings": False,
}

FURTHER_VARIANTS: dict[str, dict[str, Any]] = {
    "bloom": _BLOOM,
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": _ERNIE_MOE,
    "exaone4": _EXAONE4,
    "exaone4_full": {
        **_EXAONE4,
        "num_hidden_layers": 2,
        "sliding_window": None,
        "layer_types": _types("full", "full"),
    },
    "glm4_moe": _GLM4_MOE,
    "gptj": _GPTJ,
    "lfm2": _LFM2,
    "llama4": {"model_type": "llama4", "text_config": _LLAMA4, "vision_config": _LLAMA4_VISION},
    "llama4_text": {
        **_LLAMA4,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "interleave_moe_layer_step": 2,
        "moe_layers": None,
    },
    "minimax_m2": _MINIMAX_M2,
    "nemotron": _NEMOTRON,
    "gemma3n": {"model_type": "gemma3n", "text_config": _GEMMA3N, "vision_config": _GEMMA3N_VISION},
    "gemma3n_text": {
        **_GEMMA3N,
        "intermediate_size": [48] * 6,
        "num_kv_shared_layers": 0,
        "altup_active_idx": 1,
        "altup_correct_scale": False,
    },
    "gemma4": {
        "model_type": "gemma4",
        "text_config": _GEMMA4,
        "vision_config": _GEMMA4_VISION,
        "audio_config": None,
    },
    "gemma4_text": _GEMMA4_EXPERTS,
}
