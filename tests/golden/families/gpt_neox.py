"""GPT-NeoX and Pythia."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, layer_norm, linear, without

_GPT_NEOX = {
    **without({**SMALL, "model_type": "gpt_neox"}, "num_key_value_heads", "rope_theta"),
    **{
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "use_parallel_residual": True,
    },
}

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt_neox": _GPT_NEOX,
    "gpt_neox_serial": {
        **_GPT_NEOX,
        "use_parallel_residual": False,
        "attention_bias": False,
        "rotary_pct": 1.0,
    },
}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, ffn, bias = config["hidden_size"], config["intermediate_size"], config.get("attention_bias", True)
    table = config["vocab_size"], hidden
    found: Shapes = {
        "gpt_neox.embed_in.weight": table,
        "embed_out.weight": table,
        **layer_norm("gpt_neox.final_layer_norm", hidden),
    }
    for index in range(config["num_hidden_layers"]):
        name = f"gpt_neox.layers.{index}"
        found |= linear(f"{name}.attention.query_key_value", 3 * hidden, hidden, bias)
        found |= linear(f"{name}.attention.dense", hidden, hidden, bias)
        found |= linear(f"{name}.mlp.dense_h_to_4h", ffn, hidden, True) | linear(
            f"{name}.mlp.dense_4h_to_h", hidden, ffn, True
        )
        found |= layer_norm(f"{name}.input_layernorm", hidden) | layer_norm(
            f"{name}.post_attention_layernorm", hidden
        )
    return found
