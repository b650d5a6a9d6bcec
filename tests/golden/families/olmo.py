"""OLMo 2 and 3."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, YARN, Shapes, attention, decoder, gated, norms_of_all_heads

_OLMO2 = {**SMALL, "model_type": "olmo2", "rms_norm_eps": 1e-6}
_OLMO3 = {
    **_OLMO2,
    "model_type": "olmo3",
    "num_hidden_layers": 4,
    "sliding_window": 30,
    "rope_theta": 500000.0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "olmo2": {**_OLMO2, "num_attention_heads": 6, "head_dim": 12},
    "olmo3": {
        **_OLMO3,
        "rope_scaling": {**YARN, "attention_factor": 1.1, "beta_fast": 32.0, "beta_slow": 1.0},
    },
}


def shapes(config: dict[str, Any]) -> Shapes:
    def layer(name: str, index: int) -> Shapes:
        projections, norms = (
            attention(f"{name}.self_attn", config),
            norms_of_all_heads(f"{name}.self_attn", config),
        )
        return projections | norms | gated(f"{name}.mlp", config["hidden_size"], config["intermediate_size"])

    return decoder(config, layer, ("post_attention_layernorm", "post_feedforward_layernorm"))
