"""Phi-3."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import Shapes, decoder, linear
from tests.golden.families.llama import PLAIN

_PHI3 = {
    **{
        **PLAIN,
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": 256,
    },
    "pad_token_id": None,
}
_LONGROPE = {
    **{**_PHI3, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75},  # 12 of 16 channels
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.5, 2.0],
        "long_factor": [1.0, 1.3, 2.0, 3.5, 6.0, 8.0],
    },
}

VARIANTS: dict[str, dict[str, Any]] = {
    "phi3_window": {**_PHI3, "sliding_window": 40},
    "phi3_longrope_inside": _LONGROPE,
    "phi3_longrope_beyond": _LONGROPE,
}
ALL_LENGTHS = tuple(VARIANTS)


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, ffn, dim = (
        config["hidden_size"],
        config["intermediate_size"],
        config["hidden_size"] // config["num_attention_heads"],
    )
    rows = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * dim

    def layer(name: str, index: int) -> Shapes:
        mixer = linear(f"{name}.self_attn.qkv_proj", rows, hidden) | linear(
            f"{name}.self_attn.o_proj", hidden, hidden
        )
        return (
            mixer
            | linear(f"{name}.mlp.gate_up_proj", 2 * ffn, hidden)
            | linear(f"{name}.mlp.down_proj", hidden, ffn)
        )

    return decoder(config, layer)
