"""GLM-4 and GLM-4-0414."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, attention, decoder, linear

_GLM = {
    **{**SMALL, "model_type": "glm", "head_dim": 20, "attention_bias": True, "partial_rotary_factor": 0.5},
    "num_attention_heads": 6,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "glm": {**_GLM, "head_dim": 16, "partial_rotary_factor": 1.0, "attention_bias": False},
    "glm4": {**_GLM, "model_type": "glm4"},
}
NORMS = ("input_layernorm", "post_attention_layernorm")


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]

    def layer(name: str, index: int) -> Shapes:
        projections = attention(f"{name}.self_attn", config, bias=config["attention_bias"], output_bias=False)
        return (
            projections
            | linear(f"{name}.mlp.gate_up_proj", 2 * ffn, hidden)
            | linear(f"{name}.mlp.down_proj", hidden, ffn)
        )

    return decoder(
        config,
        layer,
        (*NORMS, "post_self_attn_layernorm", "post_mlp_layernorm")
        if config["model_type"] == "glm4"
        else NORMS,
    )
