"""StableLM."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, attention, decoder, gated, layer_norm

_STABLELM = {
    **SMALL,
    "model_type": "stablelm",
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
    "use_qkv_bias": True,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "stablelm": _STABLELM,
    "stablelm_parallel": {
        **_STABLELM,
        "use_qkv_bias": False,
        "qk_layernorm": True,
        "use_parallel_residual": True,
    },
}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    counts = {"q": heads, "k": config["num_key_value_heads"]} if config.get("qk_layernorm") else {}

    def layer(name: str, index: int) -> Shapes:
        found = attention(f"{name}.self_attn", config, bias=config["use_qkv_bias"], output_bias=False)
        for part, count in counts.items():
            weights = [f"{name}.self_attn.{part}_layernorm.norms.{head}.weight" for head in range(count)]
            found |= dict.fromkeys(weights, (hidden // heads,))
        return found | gated(f"{name}.mlp", hidden, config["intermediate_size"])

    one = config.get("use_parallel_residual")
    return decoder(
        config,
        layer,
        ("input_layernorm",) if one else ("input_layernorm", "post_attention_layernorm"),
        layer_norm,
    )
