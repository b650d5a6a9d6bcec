"""EXAONE 4."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, attention, decoder, gated, head_norms, types

_EXAONE4 = {**SMALL, "model_type": "exaone4", "head_dim": 24, "num_hidden_layers": 4, "sliding_window": 30}

VARIANTS: dict[str, dict[str, Any]] = {
    "exaone4": _EXAONE4,
    "exaone4_full": {
        **_EXAONE4,
        "num_hidden_layers": 2,
        "sliding_window": None,
        "layer_types": types("full", "full"),
    },
}


def shapes(config: dict[str, Any]) -> Shapes:
    def layer(name: str, index: int) -> Shapes:
        mixer = attention(f"{name}.self_attn", config) | head_norms(f"{name}.self_attn", config["head_dim"])
        return mixer | gated(f"{name}.mlp", config["hidden_size"], config["intermediate_size"])

    return decoder(config, layer, ("post_attention_layernorm", "post_feedforward_layernorm"))
