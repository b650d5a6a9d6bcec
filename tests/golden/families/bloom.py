"""BLOOM."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import BARE, Shapes, layer_norm, linear

_BLOOM = {
    **BARE,
    "model_type": "bloom",
    "hidden_size": 72,
    "n_layer": 2,
    "n_head": 6,
    "seq_length": 256,
    "tie_word_embeddings": False,
}

VARIANTS: dict[str, dict[str, Any]] = {"bloom": _BLOOM}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden = config.get("n_embed") or config["hidden_size"]
    found: Shapes = {"transformer.word_embeddings.weight": (config["vocab_size"], hidden)}
    for norm in ("word_embeddings_layernorm", "ln_f"):
        found |= layer_norm(f"transformer.{norm}", hidden)
    for index in range(config["n_layer"]):
        name = f"transformer.h.{index}"
        found |= linear(f"{name}.self_attention.query_key_value", 3 * hidden, hidden, True)
        found |= linear(f"{name}.self_attention.dense", hidden, hidden, True)
        found |= linear(f"{name}.mlp.dense_h_to_4h", 4 * hidden, hidden, True)
        found |= linear(f"{name}.mlp.dense_4h_to_h", hidden, 4 * hidden, True)
        found |= layer_norm(f"{name}.input_layernorm", hidden) | layer_norm(
            f"{name}.post_attention_layernorm", hidden
        )
    return found | (
        {} if config.get("tie_word_embeddings", True) else linear("lm_head", config["vocab_size"], hidden)
    )
