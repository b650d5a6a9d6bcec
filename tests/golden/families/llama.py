"""Llama, with all kinds of rotary scaling; Qwen2."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import BASE, YARN, Shapes, attention, decoder, gated, without

LLAMA = {
    **{
        **BASE,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
    },
    **{"rms_norm_eps": 1e-5, "hidden_act": "silu"},
}
PLAIN = without(LLAMA, "attention_bias", "mlp_bias")  # of families that have no such fields
_DYNAMIC = {**LLAMA, "max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MSCALE = {
    **YARN,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
    "truncate": False,
}
_QWEN2 = {**PLAIN, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1000000.0}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama_mha": {**LLAMA, "num_key_value_heads": 4},
    "llama_gqa": {**LLAMA, "num_attention_heads": 8},
    "llama_mqa": {**LLAMA, "num_key_value_heads": 1, "vocab_size": 101},
    "llama_tied": {**LLAMA, "tie_word_embeddings": True},
    "llama_attention_bias": {**LLAMA, "attention_bias": True},
    "llama_mlp_bias": {**LLAMA, "mlp_bias": True},
    "llama_head_dim": {**LLAMA, "head_dim": 24, "num_hidden_layers": 3},
    "rope_llama3": {**LLAMA, "rope_theta": 500000.0, "rope_scaling": _LLAMA3},
    "rope_linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope_dynamic_inside": _DYNAMIC,
    "rope_dynamic_beyond": _DYNAMIC,
    "rope_yarn": {**LLAMA, "rope_scaling": YARN},
    "rope_yarn_mscale": {**LLAMA, "rope_scaling": _MSCALE},
    "rope_yarn_attention_factor": {**LLAMA, "rope_scaling": {**YARN, "attention_factor": 0.9}},
    "qwen2_untied": _QWEN2,
    "qwen2_tied": {**_QWEN2, "tie_word_embeddings": True},
    "qwen2_window": {
        **_QWEN2,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 70,
        "max_window_layers": 1,
    },
}
ALL_LENGTHS = tuple(VARIANTS)


def shapes(config: dict[str, Any]) -> Shapes:
    bias = config.get("attention_bias", False)

    def layer(name: str, index: int) -> Shapes:
        projections = attention(
            f"{name}.self_attn", config, bias=bias or config["model_type"] == "qwen2", output_bias=bias
        )
        return projections | gated(
            f"{name}.mlp", config["hidden_size"], config["intermediate_size"], config.get("mlp_bias", False)
        )

    return decoder(config, layer)
