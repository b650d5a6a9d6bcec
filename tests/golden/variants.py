"""Configurations of the tiny models: Hugging Face's config.json, by variant."""

from __future__ import annotations

from typing import Any

from tests.golden.expert_variants import EXPERT_VARIANTS
from tests.golden.further_variants import FURTHER_VARIANTS
from tests.golden.later_variants import LATER_VARIANTS
from tests.golden.more_variants import MORE_VARIANTS

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
    """The configuration without the fields that only Llama uses."""
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
_QWEN2 = {
    **_plain(_LLAMA),
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "rope_theta": 1000000.0,
}
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
_GEMMA2 = {
    **_plain(_LLAMA),
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "num_hidden_layers": 3,
    "head_dim": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 1.0,
    "sliding_window": 30,
    "tie_word_embeddings": True,
}
_GEMMA3 = {
    **_GEMMA2,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window_pattern": 2,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 96,
    "n_embd": 64,
    "n_inner": 112,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "activation_function": "gelu_new",
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}
_OPT = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "ffn_dim": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}
_MIXTRAL = {
    **_plain(_LLAMA),
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_QWEN3_MOE = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
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
        "rope_scaling": {
            **_YARN,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "truncate": False,
        },
    },
    "rope_yarn_attention_factor": {**_LLAMA, "rope_scaling": {**_YARN, "attention_factor": 0.9}},
    "qwen3_untied": _QWEN3,
    "qwen3_tied": {**_QWEN3, "tie_word_embeddings": True, "attention_bias": True},
    "mistral_window": {**_MISTRAL, "sliding_window": 24},
    "mistral_head_dim": {**_MISTRAL, "sliding_window": None, "head_dim": 24},
    "qwen2_untied": _QWEN2,
    "qwen2_tied": {**_QWEN2, "tie_word_embeddings": True},
    "qwen2_window": {
        **_QWEN2,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 70,
        "max_window_layers": 1,
    },
    "phi3_window": {**_PHI3, "sliding_window": 40},
    "phi3_longrope_inside": _LONGROPE,
    "phi3_longrope_beyond": _LONGROPE,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gpt2": _GPT2,
    "opt_125m": _OPT,
    "opt_350m": {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "opt_1.3b": {**_OPT, "hidden_size": 96, "num_attention_heads": 6, "word_embed_proj_dim": 96},
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe_mixed": {
        **_QWEN3_MOE,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
    },
    **MORE_VARIANTS,
    **EXPERT_VARIANTS,
    **FURTHER_VARIANTS,
    **LATER_VARIANTS,
}
