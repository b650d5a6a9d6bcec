"""GPT-J."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import BARE, Shapes, layer_norm, linear

_GPTJ = {
    **{
        **BARE,
        "model_type": "gptj",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "rotary_dim": 8,
        "n_inner": 112,
    },
    **{"activation_function": "gelu_new", "tie_word_embeddings": False},
}

VARIANTS: dict[str, dict[str, Any]] = {"gptj": _GPTJ}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, ffn, table = (
        config["n_embd"],
        config["n_inner"] or 4 * config["n_embd"],
        (config["vocab_size"], config["n_embd"]),
    )
    found: Shapes = {"transformer.wte.weight": table, **layer_norm("transformer.ln_f", hidden)}
    for index in range(config["n_layer"]):
        name = f"transformer.h.{index}"
        for part in ("q", "k", "v", "out"):
            found |= linear(f"{name}.attn.{part}_proj", hidden, hidden)
        found |= linear(f"{name}.mlp.fc_in", ffn, hidden, True) | linear(
            f"{name}.mlp.fc_out", hidden, ffn, True
        )
        found |= layer_norm(f"{name}.ln_1", hidden)
    return found | linear("lm_head", *table, True)
