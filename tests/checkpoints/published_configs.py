"""The config.json fields of published repositories, except for sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
KV = {"num_key_value_heads": 2}


def llama(**changes: Any) -> dict[str, Any]:
    """Meta's fields."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **SIZES,
        **KV,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
        **changes,
    }


def qwen2(**changes: Any) -> dict[str, Any]:
    fields = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
    }
    windows = {"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False}
    return (
        without(llama(**fields, **windows), "attention_bias", "mlp_bias", "pretraining_tp", "rope_scaling")
        | changes
    )


def qwen3(**changes: Any) -> dict[str, Any]:
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 64,
        "max_window_layers": 28,
    }
    return (
        without(
            llama(**fields, rope_theta=1000000, sliding_window=None, use_sliding_window=False),
            "mlp_bias",
            "pretraining_tp",
        )
        | changes
    )


def mistral(**changes: Any) -> dict[str, Any]:
    fields = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
        "rope_theta": 1000000.0,
    }
    return without(llama(**fields), "attention_bias", "mlp_bias", "pretraining_tp", "rope_scaling") | changes


def gemma(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **SIZES,
        **KV,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": [1],
        "head_dim": 48,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "max_position_embeddings": 8192,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **changes,
    }


def phi3(**changes: Any) -> dict[str, Any]:
    auto = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    }
    fields = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "auto_map": auto,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    window = {"original_max_position_embeddings": 2048, "sliding_window": 2047}
    return without(llama(**fields, **window), "mlp_bias", "pretraining_tp") | changes


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def gptq(**changes: Any) -> dict[str, Any]:
    fields = {
        "bits": 4,
        "damp_percent": 0.1,
        "desc_act": False,
        "group_size": 128,
        "is_marlin_format": False,
        "model_file_base_name": "model",
    }
    return {
        "quant_method": "gptq",
        **fields,
        "model_name_or_path": None,
        "static_groups": False,
        "sym": True,
        "true_sequential": True,
        **changes,
    }


def awq(**changes: Any) -> dict[str, Any]:
    fields = {
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": None,
        "version": "gemm",
        "zero_point": True,
    }
    return {"quant_method": "awq", **fields, **changes}


def compressed(form: str, weights: Fields, inputs: Fields | None, **changes: Any) -> dict[str, Any]:
    common = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {
        "input_activations": inputs,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**common, "symmetric": True, **weights},
    }
    fields = {"format": form, "global_compression_ratio": 1.5, "ignore": ["lm_head"], "kv_cache_scheme": None}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        **fields,
        "quantization_status": "compressed",
        **changes,
    }


def bitsandbytes(**changes: Any) -> dict[str, Any]:
    fields = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    }
    return {"quant_method": "bitsandbytes", **fields, **changes}


LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
DYNAMIC = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True}
FREQUENCIES = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": (16,) for layer in range(2)}
GPT2_MASKS = {f"h.{layer}.attn.bias": (1, 1, 256, 256) for layer in range(2)}
NEOX_MASKS: dict[str, tuple[int, ...]] = {
    **{f"gpt_neox.layers.{layer}.attention.bias": (1, 1, 256, 256) for layer in range(2)},
    **{f"gpt_neox.layers.{layer}.attention.masked_bias": () for layer in range(2)},
    **{f"gpt_neox.layers.{layer}.attention.rotary_emb.inv_freq": (4,) for layer in range(2)},
}
BLOOM = {
    **{
        "architectures": ["BloomModel"],
        "model_type": "bloom",
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
    },
    **{
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_dropout": 0.0,
    },
    **{
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "masked_softmax_fusion": True,
        "n_embed": 128,
        "n_inner": None,
        "n_layer": 2,
    },
    **{
        "num_attention_heads": 4,
        "offset_alibi": 100,
        "pad_token_id": 3,
        "pretraining_tp": 1,
        "skip_bias_add": True,
        "vocab_size": 512,
    },
    **{"skip_bias_add_qkv": False, "transformers_version": "4.20.0", "unk_token_id": 0, "use_cache": True},
}
GPTJ = {
    **{
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
    },
    **{
        "embd_pdrop": 0.0,
        "eos_token_id": 0,
        "gradient_checkpointing": False,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
    },
    **{
        "n_embd": 128,
        "n_head": 4,
        "n_inner": None,
        "n_layer": 2,
        "n_positions": 2048,
        "resid_pdrop": 0.0,
        "rotary": True,
        "rotary_dim": 16,
    },
    **{"scale_attn_weights": True, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 512},
}
OPT = {
    "_remove_final_layer_norm": False,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "do_layer_norm_before": True,
    "enable_bias": True,
    "eos_token_id": 2,
    "ffn_dim": 256,
    "layer_norm_elementwise_affine": True,
    "layerdrop": 0.0,
    "max_position_embeddings": 256,
    "model_type": "opt",
    "prefix": "</s>",
    "torch_dtype": "float16",
    "word_embed_proj_dim": 128,
}
OPT |= {name: size for name, size in SIZES.items() if name != "intermediate_size"}
PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"],
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 256,
    "model_type": "gpt_neox",
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_parallel_residual": True,
    **SIZES,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "eos_token_id": 1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 256,
    "n_embd": 128,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 256,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 512,
}
FALCON = {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "bias": False,
    "hidden_size": 128,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
}
GEMMA3_TEXT = {
    **gemma(
        "gemma3_text",
        "Gemma3ForCausalLM",
        query_pre_attn_scalar=256,
        rope_theta=1e6,
        rope_local_base_freq=10000.0,
    )
}
GEMMA3_TEXT |= {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_scaling": None,
    "sliding_window": 512,
}
GEMMA3_TEXT |= {"sliding_window_pattern": 6, "cache_implementation": "hybrid"}
VISION = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2},
    **{"image_size": 56, "model_type": "siglip_vision_model", "patch_size": 14, "vision_use_head": False},
}
MIXTRAL = {
    **mistral(),
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
}
MIXTRAL |= {"output_router_logits": False, "router_aux_loss_coef": 0.02}
QWEN3_MOE = {
    **qwen3(),
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN3_MOE |= {
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
}
GLM4 = {
    **llama(attention_bias=True, head_dim=32, partial_rotary_factor=0.5, eos_token_id=[1, 2, 3]),
    "model_type": "glm4",
}
GLM4 = without(GLM4, "mlp_bias", "pretraining_tp", "rope_scaling") | {"architectures": ["Glm4ForCausalLM"]}
STABLELM = {
    "architectures": ["StableLmForCausalLM"],
    "model_type": "stablelm",
    "layer_norm_eps": 1e-05,
    "partial_rotary_factor": 0.25,
}
STABLELM |= {
    **SIZES,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
}
STABLELM |= {
    "qk_layernorm": False,
    "use_parallel_residual": False,
    "use_qkv_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
PHI2 = {
    "architectures": ["PhiForCausalLM"],
    "model_type": "phi",
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-05,
    **SIZES,
}
PHI2 |= {
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.4,
    "qk_layernorm": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}
PHI2 |= {
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "hidden_size": 160,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"],
    "model_type": "starcoder2",
    "hidden_act": "gelu_pytorch_tanh",
    **SIZES,
    **KV,
}
STARCODER2 |= {
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "rope_theta": 999999.44,
}
STARCODER2 |= {"sliding_window": 4096, "use_bias": True}
OLMO2 = {
    **without(llama(rope_theta=500000, rms_norm_eps=1e-06), "mlp_bias", "pretraining_tp"),
    "model_type": "olmo2",
}
GRANITE = {
    **llama(tie_word_embeddings=True, rope_theta=5000000.0),
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
}
GRANITE |= {
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
}
SMOLLM3 = {
    **llama(tie_word_embeddings=True, rope_theta=5000000.0),
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
}
SMOLLM3 |= {
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 0],
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
