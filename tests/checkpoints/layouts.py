"""Sixty published repositories, each shrunk: config.json as published but for its sizes, tensors named and stored as there, a tokenizer
of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = Mapping[str, Any]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
KV = {"num_key_value_heads": 2}


@dataclass(frozen=True)
class Layout:
    """A repository.

    Attributes:
        config: of config.json; of a GGUF file, the fields that it is made of.
        weights: files, by `writing.WRITERS`.
        tokenizer: kind, by `writing.TOKENIZERS`.
        extra: tensors beside the model's own: names and shapes.
        renamed: (from, to) at the beginning of tensors' names.
        rejected: how the error's text begins after the file; None: it loads.
    """

    config: Fields = field(default_factory=dict)
    weights: str = "safetensors"
    tokenizer: str = "byte_level"
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    renamed: tuple[str, str] = ("", "")
    rejected: str | None = None


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
    fields = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0}
    windows = {"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False}
    return without(llama(**fields, **windows), "attention_bias", "mlp_bias", "pretraining_tp", "rope_scaling") | changes


def qwen3(**changes: Any) -> dict[str, Any]:
    fields = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64, "max_window_layers": 28}
    return (
        without(llama(**fields, rope_theta=1000000, sliding_window=None, use_sliding_window=False), "mlp_bias", "pretraining_tp") | changes
    )


def mistral(**changes: Any) -> dict[str, Any]:
    fields = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0}
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
    auto = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    fields = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "auto_map": auto, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
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
    fields = {"bits": 4, "group_size": 128, "modules_to_not_convert": None, "version": "gemm", "zero_point": True}
    return {"quant_method": "awq", **fields, **changes}


def compressed(form: str, weights: Fields, inputs: Fields | None, **changes: Any) -> dict[str, Any]:
    common = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "observer": "minmax", "observer_kwargs": {}}
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
    fields = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
    return {"quant_method": "bitsandbytes", **fields, **changes}


def refused_family(model_type: str) -> Layout:
    return Layout({"model_type": model_type, "torch_dtype": "bfloat16", **SIZES}, rejected=f"model_type '{model_type}' is not supported; ")


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
GEMMA3_TEXT = {**gemma("gemma3_text", "Gemma3ForCausalLM", query_pre_attn_scalar=256, rope_theta=1e6, rope_local_base_freq=10000.0)}
GEMMA3_TEXT |= {"attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_scaling": None, "sliding_window": 512}
GEMMA3_TEXT |= {"sliding_window_pattern": 6, "cache_implementation": "hybrid"}
VISION = {"hidden_size": 32, "model_type": "siglip_vision_model", "num_hidden_layers": 2}
MIXTRAL = {**mistral(), "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 4}
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
GLM4 = {**llama(attention_bias=True, head_dim=32, partial_rotary_factor=0.5, eos_token_id=[1, 2, 3]), "model_type": "glm4"}
GLM4 = without(GLM4, "mlp_bias", "pretraining_tp", "rope_scaling") | {"architectures": ["Glm4ForCausalLM"]}
STABLELM = {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "layer_norm_eps": 1e-05, "partial_rotary_factor": 0.25}
STABLELM |= {**SIZES, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 4096, "rope_theta": 10000}
STABLELM |= {
    "qk_layernorm": False,
    "use_parallel_residual": False,
    "use_qkv_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
PHI2 = {"architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_act": "gelu_new", "layer_norm_eps": 1e-05, **SIZES}
PHI2 |= {"num_key_value_heads": 4, "partial_rotary_factor": 0.4, "qk_layernorm": False, "rope_theta": 10000.0, "rope_scaling": None}
PHI2 |= {
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "hidden_size": 160,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
STARCODER2 = {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", **SIZES, **KV}
STARCODER2 |= {
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "rope_theta": 999999.44,
}
STARCODER2 |= {"sliding_window": 4096, "use_bias": True}
OLMO2 = {**without(llama(rope_theta=500000, rms_norm_eps=1e-06), "mlp_bias", "pretraining_tp"), "model_type": "olmo2"}
GRANITE = {**llama(tie_word_embeddings=True, rope_theta=5000000.0), "model_type": "granite", "architectures": ["GraniteForCausalLM"]}
GRANITE |= {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
SMOLLM3 = {**llama(tie_word_embeddings=True, rope_theta=5000000.0), "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}
SMOLLM3 |= {
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 0],
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
}

LAYOUTS: dict[str, Layout] = {
    "meta-llama/Llama-2-7b-hf": Layout(llama(num_key_value_heads=4, torch_dtype="float16"), "bin shards", "byte_fallback", FREQUENCIES),
    "meta-llama/Meta-Llama-3-8B-Instruct": Layout(llama(rope_theta=500000.0, vocab_size=512), "shards"),
    "meta-llama/Llama-3.2-1B-Instruct": Layout(llama(rope_scaling=LLAMA3_ROPE, head_dim=32, tie_word_embeddings=True, eos_token_id=[1, 2])),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Layout(llama(), tokenizer="byte_fallback"),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Layout(llama(is_llama_config=True, rope_interleaved=False, tie_word_embeddings=True)),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": Layout(llama(rope_scaling=LLAMA3_ROPE), "shards"),
    "lmsys/vicuna-7b-v1.5": Layout(llama(num_key_value_heads=4, pad_token_id=0), "bin shards", "byte_fallback", FREQUENCIES),
    "Qwen/Qwen2.5-0.5B-Instruct": Layout(qwen2(tie_word_embeddings=True)),
    "Qwen/Qwen2.5-7B-Instruct": Layout(qwen2(), "shards"),
    "Qwen/Qwen2.5-7B-Instruct-1M": Layout(qwen2(rope_scaling=YARN), "shards"),
    "Qwen/Qwen3-0.6B": Layout(qwen3(tie_word_embeddings=True), extra={"lm_head.weight": (512, 128)}),
    "Qwen/Qwen3-8B": Layout(qwen3(), "shards"),
    "Qwen/Qwen3-Embedding-0.6B": Layout(qwen3(tie_word_embeddings=True), renamed=("model.", "")),
    "Qwen/Qwen3-30B-A3B": Layout(QWEN3_MOE, "shards"),
    "mistralai/Mistral-7B-v0.1": Layout(mistral(sliding_window=4096, rope_theta=10000.0), "bin shards", "byte_fallback"),
    "mistralai/Mistral-7B-Instruct-v0.3": Layout(mistral(), "shards", "byte_fallback"),
    "mistralai/Mistral-Nemo-Instruct-2407": Layout(mistral(head_dim=64), "shards", "tekken"),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": Layout(MIXTRAL, "shards", "byte_fallback"),
    "google/gemma-2b": Layout(
        gemma("gemma", "GemmaForCausalLM", tie_word_embeddings=True, hidden_activation=None), "shards", "byte_fallback"
    ),
    "google/gemma-2-2b-it": Layout(
        gemma(
            "gemma2",
            "Gemma2ForCausalLM",
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            query_pre_attn_scalar=256,
            sliding_window=4096,
            cache_implementation="hybrid",
        ),
        "shards",
        "byte_fallback",
    ),
    "google/gemma-3-1b-it": Layout(GEMMA3_TEXT, tokenizer="byte_fallback"),
    "google/gemma-3-4b-it": Layout(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "boi_token_index": 5,
            "eos_token_id": [1, 106],
            "image_token_index": 7,
            "mm_tokens_per_image": 256,
            "text_config": without(GEMMA3_TEXT, "architectures", "torch_dtype"),
            "torch_dtype": "bfloat16",
            "vision_config": VISION,
        },
        "shards",
        "byte_fallback",
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": Layout(
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "image_token_index": 10,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "text_config": {**without(mistral(head_dim=32), "architectures"), "model_type": "mistral"},
            "torch_dtype": "bfloat16",
            "vision_config": {**VISION, "model_type": "pixtral"},
            "vision_feature_layer": -1,
        },
        "shards",
        "tekken",
    ),
    "microsoft/Phi-3-mini-4k-instruct": Layout(phi3(num_key_value_heads=4), "shards", "byte_fallback"),
    "microsoft/Phi-3-mini-128k-instruct": Layout(
        phi3(rope_scaling={"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}, max_position_embeddings=8192),
        "shards",
        "byte_fallback",
    ),
    "microsoft/phi-4": Layout(phi3(sliding_window=None, original_max_position_embeddings=2048), "shards"),
    "microsoft/phi-2": Layout(PHI2, "shards", "byte_level"),
    "openai-community/gpt2": Layout(GPT2, "safetensors", "byte_level", GPT2_MASKS, ("transformer.", "")),
    "distilbert/distilgpt2": Layout(
        {**GPT2, "_num_labels": 1}, "safetensors", "byte_level", {f"transformer.{n}": s for n, s in GPT2_MASKS.items()}
    ),
    "facebook/opt-125m": Layout(OPT, "bin", "older"),
    "facebook/opt-350m": Layout(
        {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 64}, "bin", "older", {"lm_head.weight": (512, 64)}
    ),
    "facebook/opt-1.3b": Layout(OPT, "bin", "older", renamed=("model.", "")),
    "EleutherAI/pythia-160m": Layout(PYTHIA, "safetensors", "byte_level", NEOX_MASKS),
    "tiiuae/falcon-7b": Layout(FALCON, "bin shards", extra={"lm_head.weight": (512, 128)}),
    "THUDM/GLM-4-9B-0414": Layout(GLM4, "shards"),
    "stabilityai/stablelm-2-1_6b": Layout(STABLELM, "safetensors", "byte_level"),
    "bigcode/starcoder2-3b": Layout(STARCODER2, "safetensors"),
    "allenai/OLMo-2-1124-7B": Layout(OLMO2, "shards"),
    "ibm-granite/granite-3.1-2b-instruct": Layout(GRANITE, "shards"),
    "HuggingFaceTB/SmolLM3-3B": Layout(SMOLLM3, "shards"),
    # Quantized
    "Qwen/Qwen2.5-7B-Instruct-AWQ": Layout(qwen2(quantization_config=awq()), "awq"),
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": Layout(llama(rope_scaling=LLAMA3_ROPE, quantization_config=awq()), "awq"),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": Layout(qwen2(quantization_config=gptq()), "gptq"),
    "TheBloke/Llama-2-7B-GPTQ": Layout(llama(quantization_config=gptq(desc_act=True)), "gptq shuffled", "byte_fallback"),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": Layout(
        llama(
            quantization_config=compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None)
        ),
        "w4a16",
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": Layout(
        llama(
            quantization_config=compressed(
                "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, {**DYNAMIC, "type": "int"}
            )
        ),
        "w8a8",
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": Layout(
        llama(
            quantization_config=compressed(
                "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, {**DYNAMIC, "type": "float"}
            )
        ),
        "fp8 outputs",
    ),
    "Qwen/Qwen3-8B-FP8": Layout(
        qwen3(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}),
        "fp8 blocks",
    ),
    # GGUF
    "bartowski/Llama-3.2-1B-Instruct-GGUF": Layout(llama(tie_word_embeddings=True), "gguf Q8_0"),
    "Qwen/Qwen3-0.6B-GGUF": Layout(qwen3(tie_word_embeddings=True), "gguf Q4_0"),
    # Rejected
    "unsloth/Llama-3.2-1B-Instruct-bnb-4bit": Layout(
        llama(quantization_config=bitsandbytes()),
        rejected="quantization_config.quant_method 'bitsandbytes' is not supported; ",
    ),
    "casperhansen/vicuna-7b-v1.5-awq-gemv": Layout(
        llama(quantization_config=awq(version="GEMV")), rejected="quantization_config.version='gemv' is not supported; gemm are"
    ),
    "TheBloke/Mistral-7B-v0.1-GPTQ:gptq-3bit": Layout(
        mistral(quantization_config=gptq(bits=3)), rejected="quantization_config.bits=3 is not supported; 4, 8 are"
    ),
    "mistralai/Mistral-7B-v0.3:consolidated": Layout(mistral(), "consolidated", rejected="has neither model.safetensors nor "),
    "google-t5/t5-small:tensorflow": Layout(llama(), "tensorflow", rejected="has neither model.safetensors nor "),
    "bigscience/bloom-560m": refused_family("bloom"),
    "EleutherAI/gpt-j-6b": refused_family("gptj"),
    "state-spaces/mamba-130m-hf": refused_family("mamba"),
    "google-bert/bert-base-uncased": refused_family("bert"),
    "Qwen/Qwen2-VL-2B-Instruct": refused_family("qwen2_vl"),
    "microsoft/Phi-3.5-MoE-instruct": refused_family("phimoe"),
    "tiiuae/falcon-rw-1b": Layout({**FALCON, "alibi": True, "parallel_attn": False}, "bin", rejected="alibi"),
    "togethercomputer/LLaMA-2-7B-32K:truncated": Layout(llama(), "truncated", rejected="is truncated"),
}
