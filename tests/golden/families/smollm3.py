"""SmolLM3."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, attention, decoder, gated, without

_SMOLLM3 = {**SMALL, "model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}

VARIANTS: dict[str, dict[str, Any]] = {
    "smollm3": _SMOLLM3,
    "smollm3_window": {
        **without(_SMOLLM3, "no_rope_layers"),
        **{"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 30},
    },
}


def shapes(config: dict[str, Any]) -> Shapes:
    def layer(name: str, index: int) -> Shapes:
        return attention(f"{name}.self_attn", config) | gated(
            f"{name}.mlp", config["hidden_size"], config["intermediate_size"]
        )

    return decoder(config, layer)
