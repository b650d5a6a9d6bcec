"""MiMo."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import BASE, Shapes, attention, decoder, gated

VARIANTS: dict[str, dict[str, Any]] = {
    "mimo": {
        **BASE,
        "model_type": "mimo",
        "num_hidden_layers": 3,
        "head_dim": 24,
        "rope_theta": 640000.0,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 1,
    }
}


def shapes(config: dict[str, Any]) -> Shapes:
    """Those of Qwen2, with heads of their own size."""

    def layer(name: str, index: int) -> Shapes:
        projections = attention(f"{name}.self_attn", config, bias=True, output_bias=False)
        return projections | gated(f"{name}.mlp", config["hidden_size"], config["intermediate_size"])

    return decoder(config, layer)
