"""LFM2."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, W, attention, decoder, gated, linear

_LFM2 = {
    **{
        **SMALL,
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "conv_bias": False,
        "pad_token_id": 0,
    },
    **{"block_auto_adjust_ff_dim": True, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.1},
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}

VARIANTS: dict[str, dict[str, Any]] = {"lfm2": _LFM2}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, dim, multiple = (
        config["hidden_size"],
        config["hidden_size"] // config["num_attention_heads"],
        config["block_multiple_of"],
    )
    ffn = (
        -(-int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3)) // multiple)
        * multiple
    )

    def layer(name: str, index: int) -> Shapes:
        if config["layer_types"][index] == "conv":
            found = linear(f"{name}.conv.in_proj", 3 * hidden, hidden) | linear(
                f"{name}.conv.out_proj", hidden, hidden
            )
            found[f"{name}.conv.conv.weight"] = hidden, 1, config["conv_L_cache"]
        else:
            found = attention(f"{name}.self_attn", config, output="out_proj")
            found |= {f"{name}.self_attn.{part}_layernorm.weight": (dim,) for part in "qk"}
        return found | gated(f"{name}.feed_forward", hidden, ffn, parts=W)

    return decoder(config, layer, ("operator_norm", "ffn_norm"), last="embedding_norm")
