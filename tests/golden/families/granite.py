"""Granite 3."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, attention, decoder, gated

_GRANITE = {
    **{
        **SMALL,
        "model_type": "granite",
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
    },
    **{"residual_multiplier": 0.6, "attention_bias": False, "mlp_bias": False},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "granite": _GRANITE,
    "granite_biases": {**_GRANITE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}


def shapes(config: dict[str, Any]) -> Shapes:
    def layer(name: str, index: int) -> Shapes:
        mlp = gated(f"{name}.mlp", config["hidden_size"], config["intermediate_size"], config["mlp_bias"])
        return attention(f"{name}.self_attn", config, bias=config["attention_bias"]) | mlp

    return decoder(config, layer)
