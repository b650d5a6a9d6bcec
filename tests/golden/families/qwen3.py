"""Qwen3."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import Shapes, attention, decoder, gated, head_norms
from tests.golden.families.llama import PLAIN

QWEN3 = {
    **{
        **PLAIN,
        "attention_bias": False,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 24,
    },
    **{"num_attention_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_untied": QWEN3,
    "qwen3_tied": {**QWEN3, "tie_word_embeddings": True, "attention_bias": True},
}
ALL_LENGTHS = tuple(VARIANTS)


def shapes(config: dict[str, Any]) -> Shapes:
    def layer(name: str, index: int) -> Shapes:
        projections = attention(f"{name}.self_attn", config, bias=config["attention_bias"])
        norms = head_norms(f"{name}.self_attn", config["head_dim"])
        return projections | norms | gated(f"{name}.mlp", config["hidden_size"], config["intermediate_size"])

    return decoder(config, layer)
