"""Nemotron."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, attention, decoder, layer_norm, linear

_NEMOTRON = {
    **{
        **SMALL,
        "model_type": "nemotron",
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "mlp_bias": True,
    },
}

VARIANTS: dict[str, dict[str, Any]] = {"nemotron": _NEMOTRON}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]

    def layer(name: str, index: int) -> Shapes:
        mlp = linear(f"{name}.mlp.up_proj", ffn, hidden, True) | linear(
            f"{name}.mlp.down_proj", hidden, ffn, True
        )
        return attention(f"{name}.self_attn", config) | mlp

    return decoder(config, layer, norm=layer_norm)
