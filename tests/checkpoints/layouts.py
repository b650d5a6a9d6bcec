"""Sixty published repositories with reduced sizes.

Each has its published config.json except for sizes, its names and storage of tensors, and a tokenizer of the
same kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.checkpoints.published_configs import (
    BLOOM,
    DYNAMIC,
    FALCON,
    FREQUENCIES,
    GEMMA3_TEXT,
    GLM4,
    GPT2,
    GPT2_MASKS,
    GPTJ,
    GRANITE,
    LLAMA3_ROPE,
    MIXTRAL,
    NEOX_MASKS,
    OLMO2,
    OPT,
    PHI2,
    PYTHIA,
    QWEN3_MOE,
    SIZES,
    SMOLLM3,
    STABLELM,
    STARCODER2,
    VISION,
    YARN,
    Fields,
    awq,
    bitsandbytes,
    compressed,
    gemma,
    gptq,
    llama,
    mistral,
    phi3,
    qwen2,
    qwen3,
    without,
)


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


def refused_family(model_type: str) -> Layout:
    return Layout(
        {"model_type": model_type, "torch_dtype": "bfloat16", **SIZES},
        rejected=f"model_type '{model_type}' is not supported; ",
    )


LAYOUTS: dict[str, Layout] = {
    "meta-llama/Llama-2-7b-hf": Layout(
        llama(num_key_value_heads=4, torch_dtype="float16"), "bin shards", "byte_fallback", FREQUENCIES
    ),
    "meta-llama/Meta-Llama-3-8B-Instruct": Layout(llama(rope_theta=500000.0, vocab_size=512), "shards"),
    "meta-llama/Llama-3.2-1B-Instruct": Layout(
        llama(rope_scaling=LLAMA3_ROPE, head_dim=32, tie_word_embeddings=True, eos_token_id=[1, 2])
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Layout(llama(), tokenizer="byte_fallback"),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Layout(
        llama(is_llama_config=True, rope_interleaved=False, tie_word_embeddings=True)
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": Layout(llama(rope_scaling=LLAMA3_ROPE), "shards"),
    "lmsys/vicuna-7b-v1.5": Layout(
        llama(num_key_value_heads=4, pad_token_id=0), "bin shards", "byte_fallback", FREQUENCIES
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": Layout(qwen2(tie_word_embeddings=True)),
    "Qwen/Qwen2.5-7B-Instruct": Layout(qwen2(), "shards"),
    "Qwen/Qwen2.5-7B-Instruct-1M": Layout(qwen2(rope_scaling=YARN), "shards"),
    "Qwen/Qwen3-0.6B": Layout(qwen3(tie_word_embeddings=True), extra={"lm_head.weight": (512, 128)}),
    "Qwen/Qwen3-8B": Layout(qwen3(), "shards"),
    "Qwen/Qwen3-Embedding-0.6B": Layout(qwen3(tie_word_embeddings=True), renamed=("model.", "")),
    "Qwen/Qwen3-30B-A3B": Layout(QWEN3_MOE, "shards"),
    "mistralai/Mistral-7B-v0.1": Layout(
        mistral(sliding_window=4096, rope_theta=10000.0), "bin shards", "byte_fallback"
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": Layout(mistral(), "shards", "byte_fallback"),
    "mistralai/Mistral-Nemo-Instruct-2407": Layout(mistral(head_dim=64), "shards", "tekken"),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": Layout(MIXTRAL, "shards", "byte_fallback"),
    "google/gemma-2b": Layout(
        gemma("gemma", "GemmaForCausalLM", tie_word_embeddings=True, hidden_activation=None),
        "shards",
        "byte_fallback",
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
            "mm_tokens_per_image": 4,
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
        phi3(
            rope_scaling={"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
            max_position_embeddings=8192,
        ),
        "shards",
        "byte_fallback",
    ),
    "microsoft/phi-4": Layout(phi3(sliding_window=None, original_max_position_embeddings=2048), "shards"),
    "microsoft/phi-2": Layout(PHI2, "shards", "byte_level"),
    "openai-community/gpt2": Layout(GPT2, "safetensors", "byte_level", GPT2_MASKS, ("transformer.", "")),
    "distilbert/distilgpt2": Layout(
        {**GPT2, "_num_labels": 1},
        "safetensors",
        "byte_level",
        {f"transformer.{n}": s for n, s in GPT2_MASKS.items()},
    ),
    "facebook/opt-125m": Layout(OPT, "bin", "older"),
    "facebook/opt-350m": Layout(
        {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 64},
        "bin",
        "older",
        {"lm_head.weight": (512, 64)},
    ),
    "facebook/opt-1.3b": Layout(OPT, "bin", "older", renamed=("model.", "")),
    "bigscience/bloom-560m": Layout(BLOOM, renamed=("transformer.", "")),
    "EleutherAI/gpt-j-6b": Layout(
        GPTJ, "bin", "byte_level", {f"transformer.{n}": s for n, s in GPT2_MASKS.items()}
    ),
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
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": Layout(
        llama(rope_scaling=LLAMA3_ROPE, quantization_config=awq()), "awq"
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": Layout(qwen2(quantization_config=gptq()), "gptq"),
    "TheBloke/Llama-2-7B-GPTQ": Layout(
        llama(quantization_config=gptq(desc_act=True)), "gptq shuffled", "byte_fallback"
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": Layout(
        llama(
            quantization_config=compressed(
                "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None
            )
        ),
        "w4a16",
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": Layout(
        llama(
            quantization_config=compressed(
                "int-quantized",
                {"num_bits": 8, "type": "int", "strategy": "channel"},
                {**DYNAMIC, "type": "int"},
            )
        ),
        "w8a8",
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": Layout(
        llama(
            quantization_config=compressed(
                "float-quantized",
                {"num_bits": 8, "type": "float", "strategy": "channel"},
                {**DYNAMIC, "type": "float"},
            )
        ),
        "fp8 outputs",
    ),
    "Qwen/Qwen3-8B-FP8": Layout(
        qwen3(
            quantization_config={
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": [128, 128],
            }
        ),
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
        llama(quantization_config=awq(version="GEMV")),
        rejected="quantization_config.version='gemv' is not supported; gemm are",
    ),
    "TheBloke/Mistral-7B-v0.1-GPTQ:gptq-3bit": Layout(
        mistral(quantization_config=gptq(bits=3)),
        rejected="quantization_config.bits=3 is not supported; 4, 8 are",
    ),
    "mistralai/Mistral-7B-v0.3:consolidated": Layout(
        mistral(), "consolidated", rejected="has neither model.safetensors nor "
    ),
    "google-t5/t5-small:tensorflow": Layout(
        llama(), "tensorflow", rejected="has neither model.safetensors nor "
    ),
    "state-spaces/mamba-130m-hf": refused_family("mamba"),
    "google-bert/bert-base-uncased": refused_family("bert"),
    "Qwen/Qwen2-VL-2B-Instruct": refused_family("qwen2_vl"),
    "ai21labs/Jamba-v0.1": refused_family("jamba"),
    "tiiuae/falcon-rw-1b": Layout({**FALCON, "alibi": True, "parallel_attn": False}, "bin", rejected="alibi"),
    "togethercomputer/LLaMA-2-7B-32K:truncated": Layout(llama(), "truncated", rejected="is truncated"),
}
