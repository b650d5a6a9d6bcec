"""Configurations of the tiny models of further families, recorded for fewer prompts: see variants.py."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_BASE = {**COMMON, "vocab_size": 64, "intermediate_size": 112, "num_hidden_layers": 2}


def _family(model_type: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_BASE, **fields}


def _without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_SMOLLM3 = _family("smollm3", num_hidden_layers=3, no_rope_layers=[1, 0, 1])
_OLMO2 = _family("olmo2", rms_norm_eps=1e-6)
_OLMO3 = {
    **_OLMO2,
    "model_type": "olmo3",
    "num_hidden_layers": 4,
    "sliding_window": 30,
    "rope_theta": 500000.0,
}
_GRANITE = _family(
    "granite",
    attention_multiplier=0.3,
    embedding_multiplier=3.0,
    logits_scaling=2.5,
    residual_multiplier=0.6,
    attention_bias=False,
    mlp_bias=False,
)
_GLM = _family("glm", head_dim=20, attention_bias=True, partial_rotary_factor=0.5, num_attention_heads=6)
_GEMMA = _family("gemma", head_dim=24, hidden_act="gelu", tie_word_embeddings=True, num_key_value_heads=1)
_GEMMA3_TEXT = _family(
    "gemma3_text",
    num_hidden_layers=3,
    head_dim=24,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=20,
    sliding_window=30,
    sliding_window_pattern=2,
    rope_theta=1000000.0,
    rope_local_base_freq=10000.0,
    rope_scaling={"rope_type": "linear", "factor": 8.0},
    tie_word_embeddings=True,
)
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
_MISTRAL = _family("mistral", head_dim=24, sliding_window=None)
_MINISTRAL3 = _family(
    "ministral3",
    head_dim=16,
    sliding_window=None,
    rope_parameters={
        **_YARN,
        "rope_theta": 10000.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.4,
    },
)
_STARCODER2 = _family(
    "starcoder2", hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5, use_bias=True, tie_word_embeddings=True
)
_STABLELM = _family("stablelm", layer_norm_eps=1e-5, partial_rotary_factor=0.25, use_qkv_bias=True)
_PHI = _family(
    "phi", hidden_act="gelu_new", layer_norm_eps=1e-5, partial_rotary_factor=0.5, num_key_value_heads=4
)
_GPT_NEOX = {
    **_without(_family("gpt_neox"), "num_key_value_heads", "rope_theta"),
    **{
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "use_parallel_residual": True,
    },
}
_FALCON = {
    **_without(_family("falcon"), "num_key_value_heads", "intermediate_size", "max_position_embeddings"),
    **{
        "layer_norm_epsilon": 1e-5,
        "bias": False,
        "alibi": False,
        "parallel_attn": True,
        "tie_word_embeddings": True,
    },
    **{"num_attention_heads": 8, "multi_query": True, "new_decoder_architecture": False},
}
_QWEN3_NEXT = {
    **_family("qwen3_next", num_hidden_layers=3, head_dim=16, partial_rotary_factor=0.25),
    **{
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "moe_intermediate_size": 40,
        "num_experts": 6,
    },
    **{
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 24,
        "norm_topk_prob": True,
        "linear_conv_kernel_dim": 4,
    },
    **{
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
    },
}
_QWEN3_NEXT_MIXED = {
    **_without(_QWEN3_NEXT, "layer_types"),
    **{
        "num_hidden_layers": 4,
        "mlp_only_layers": [1, 2],
        "norm_topk_prob": False,
        "linear_num_value_heads": 2,
    },
    **{"linear_conv_kernel_dim": 3, "attention_bias": True},
}
_QWEN3_5 = {
    **_without(
        _QWEN3_NEXT,
        "rope_theta",
        "partial_rotary_factor",
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
    ),
    **{"model_type": "qwen3_5_text", "head_dim": 32, "attn_output_gate": True, "mtp_num_hidden_layers": 1},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        **{"mrope_interleaved": True, "mrope_section": [2, 1, 1]},
    },
}
_QWEN3_5 = _without(_QWEN3_5, "shared_expert_intermediate_size", "norm_topk_prob")
_QWEN3_5_MOE = {
    **_without(_QWEN3_5, "intermediate_size", "layer_types"),
    **{
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "moe_intermediate_size": 40,
    },
    **{
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 24,
        "linear_num_value_heads": 2,
    },
}
_QWEN3_5_VISION = {
    **{
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    },
    "patch_size": 14,
}
_FALCON_NEW = {
    **_FALCON,
    "new_decoder_architecture": True,
    "num_kv_heads": 2,
    "ffn_hidden_size": 96,
    "tie_word_embeddings": False,
}

MORE_VARIANTS: dict[str, dict[str, Any]] = {
    "smollm3": _SMOLLM3,
    "smollm3_window": {
        **_without(_SMOLLM3, "no_rope_layers"),
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 30,
    },
    "olmo2": {**_OLMO2, "num_attention_heads": 6, "head_dim": 12},
    "olmo3": {
        **_OLMO3,
        "rope_scaling": {**_YARN, "attention_factor": 1.1, "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "granite": _GRANITE,
    "granite_biases": {**_GRANITE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "glm": {**_GLM, "head_dim": 16, "partial_rotary_factor": 1.0, "attention_bias": False},
    "glm4": {**_GLM, "model_type": "glm4"},
    "gemma": _GEMMA,
    "gemma3_images": {
        "model_type": "gemma3",
        "text_config": _GEMMA3_TEXT,
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
    },
    "mistral3": {
        "model_type": "mistral3",
        "text_config": _MISTRAL,
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16},
        "tie_word_embeddings": False,
    },
    "ministral3": _MINISTRAL3,
    "starcoder2": _STARCODER2,
    "starcoder2_window": {
        **_STARCODER2,
        "sliding_window": 40,
        "use_bias": False,
        "tie_word_embeddings": False,
    },
    "stablelm": _STABLELM,
    "stablelm_parallel": {
        **_STABLELM,
        "use_qkv_bias": False,
        "qk_layernorm": True,
        "use_parallel_residual": True,
    },
    "phi": _PHI,
    "gpt_neox": _GPT_NEOX,
    "gpt_neox_serial": {
        **_GPT_NEOX,
        "use_parallel_residual": False,
        "attention_bias": False,
        "rotary_pct": 1.0,
    },
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_next_mixed": _QWEN3_NEXT_MIXED,
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": _QWEN3_5,
        "vision_config": {**_QWEN3_5_VISION, "model_type": "qwen3_5"},
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": _QWEN3_5_MOE,
        "vision_config": {**_QWEN3_5_VISION, "model_type": "qwen3_5_moe"},
    },
    "qwen3_5_text": {**_QWEN3_5, "tie_word_embeddings": True, "linear_num_value_heads": 2},
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "falcon_7b": _FALCON,
    "falcon_11b": {**_FALCON_NEW, "num_ln_in_parallel_attn": 1},
    "falcon_40b": _FALCON_NEW,
    "falcon_serial": {**_FALCON, "parallel_attn": False, "multi_query": False, "bias": True},
}
