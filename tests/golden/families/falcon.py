"""Falcon: 7B, 11B, 40B, and without parallel attention."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, layer_norm, linear, without

_FALCON = {
    **without(
        {**SMALL, "model_type": "falcon"},
        "num_key_value_heads",
        "intermediate_size",
        "max_position_embeddings",
    ),
    **{
        "layer_norm_epsilon": 1e-5,
        "bias": False,
        "alibi": False,
        "parallel_attn": True,
        "tie_word_embeddings": True,
    },
    **{"num_attention_heads": 8, "multi_query": True, "new_decoder_architecture": False},
}
_NEW = {
    **_FALCON,
    "new_decoder_architecture": True,
    "num_kv_heads": 2,
    "ffn_hidden_size": 96,
    "tie_word_embeddings": False,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "falcon_7b": _FALCON,
    "falcon_11b": {**_NEW, "num_ln_in_parallel_attn": 1},
    "falcon_40b": _NEW,
    "falcon_serial": {**_FALCON, "parallel_attn": False, "multi_query": False, "bias": True},
}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, heads, bias, new = (
        config[n] for n in ("hidden_size", "num_attention_heads", "bias", "new_decoder_architecture")
    )
    kv_heads, ffn = (
        config["num_kv_heads"] if new else 1 if config["multi_query"] else heads,
        config.get("ffn_hidden_size") or 4 * hidden,
    )
    norms = (
        ["input_layernorm"] if config["parallel_attn"] else ["input_layernorm", "post_attention_layernorm"]
    )
    if new and config.get("num_ln_in_parallel_attn", 2) == 2:
        norms = ["ln_attn", "ln_mlp"]
    table = config["vocab_size"], hidden
    found: Shapes = {"transformer.word_embeddings.weight": table, **layer_norm("transformer.ln_f", hidden)}
    for index in range(config["num_hidden_layers"]):
        name = f"transformer.h.{index}"
        found |= linear(
            f"{name}.self_attention.query_key_value", (heads + 2 * kv_heads) * hidden // heads, hidden, bias
        )
        found |= linear(f"{name}.self_attention.dense", hidden, hidden, bias)
        found |= linear(f"{name}.mlp.dense_h_to_4h", ffn, hidden, bias) | linear(
            f"{name}.mlp.dense_4h_to_h", hidden, ffn, bias
        )
        for norm in norms:
            found |= layer_norm(f"{name}.{norm}", hidden)
    return found | ({} if config["tie_word_embeddings"] else {"lm_head.weight": table})
