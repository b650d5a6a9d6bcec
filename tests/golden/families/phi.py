"""Phi-1, 1.5 and 2."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, attention, decoder, layer_norm, linear

_PHI = {
    **{
        **SMALL,
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    "num_key_value_heads": 4,
}

VARIANTS: dict[str, dict[str, Any]] = {"phi": _PHI}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]

    def layer(name: str, index: int) -> Shapes:
        mixer = attention(f"{name}.self_attn", config, bias=True, output="dense")
        return (
            mixer
            | linear(f"{name}.mlp.fc1", ffn, hidden, True)
            | linear(f"{name}.mlp.fc2", hidden, ffn, True)
        )

    return decoder(config, layer, ("input_layernorm",), layer_norm, last="final_layernorm", head_bias=True)
