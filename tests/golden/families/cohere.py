"""Command R, Aya; Command R7B and A."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, attention, decoder, gated, types

_COHERE = {
    **SMALL,
    "model_type": "cohere",
    "logit_scale": 0.25,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_COHERE2 = {
    **{
        **_COHERE,
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "sliding_window": 30,
        "sliding_window_pattern": 4,
    },
    "logit_scale": 0.3,
}
_WIDE = {
    "sliding_window": 250,
    "num_hidden_layers": 2,
    "layer_types": types("full", "sliding"),
    "attention_bias": True,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "cohere": _COHERE,
    "cohere_norms": {**_COHERE, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
    "cohere2": _COHERE2,
    "cohere2_wide": {**_COHERE2, **_WIDE},
}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, heads, kv_heads = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    counts = {"q": heads, "k": kv_heads} if config.get("use_qk_norm") else {}

    def layer(name: str, index: int) -> Shapes:
        found = attention(f"{name}.self_attn", config, bias=config.get("attention_bias", False))
        found |= {
            f"{name}.self_attn.{part}_norm.weight": (count, hidden // heads) for part, count in counts.items()
        }
        return found | gated(f"{name}.mlp", hidden, config["intermediate_size"])

    return decoder(config, layer, ("input_layernorm",))
