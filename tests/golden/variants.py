"""Configurations of the tiny models: Hugging Face's config.json, by variant."""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that only Llama reads."""
    return {name: value for name, value in config.items() if name not in ("attention_bias", "mlp_bias")}


_QWEN3 = {
    **_plain(_LLAMA),
    "attention_bias": False,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 24,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_DYNAMIC = {**_LLAMA, "max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
_MISTRAL = {**_plain(_LLAMA), "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
_QWEN2 = {**_plain(_LLAMA), "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1000000.0}
_PHI3 = {
    **_plain(_LLAMA),
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "original_max_position_embeddings": 256,
    "pad_token_id": None,
}
_LONGROPE = {
    **_PHI3,
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,  # 12 of 16 channels
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.5, 2.0],
        "long_factor": [1.0, 1.3, 2.0, 3.5, 6.0, 8.0],
    },
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama_mha": {**_LLAMA, "num_key_value_heads": 4},
    "llama_gqa": {**_LLAMA, "num_attention_heads": 8},
    "llama_mqa": {**_LLAMA, "num_key_value_heads": 1, "vocab_size": 101},
    "llama_tied": {**_LLAMA, "tie_word_embeddings": True},
    "llama_attention_bias": {**_LLAMA, "attention_bias": True},
    "llama_mlp_bias": {**_LLAMA, "mlp_bias": True},
    "llama_head_dim": {**_LLAMA, "head_dim": 24, "num_hidden_layers": 3},
    "rope_llama3": {
        **_LLAMA,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "rope_linear": {**_LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope_dynamic_inside": _DYNAMIC,
    "rope_dynamic_beyond": _DYNAMIC,
    "rope_yarn": {**_LLAMA, "rope_scaling": _YARN},
    "rope_yarn_mscale": {
        **_LLAMA,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
    },
    "rope_yarn_attention_factor": {**_LLAMA, "rope_scaling": {**_YARN, "attention_factor": 0.9}},
    "qwen3_untied": _QWEN3,
    "qwen3_tied": {**_QWEN3, "tie_word_embeddings": True, "attention_bias": True},
    "mistral_window": {**_MISTRAL, "sliding_window": 24},
    "mistral_head_dim": {**_MISTRAL, "sliding_window": None, "head_dim": 24},
    "qwen2_untied": _QWEN2,
    "qwen2_tied": {**_QWEN2, "tie_word_embeddings": True},
    "qwen2_window": {**_QWEN2, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1},
    "phi3_window": {**_PHI3, "sliding_window": 40},
    "phi3_longrope_inside": _LONGROPE,
    "phi3_longrope_beyond": _LONGROPE,
}
