"""OPT."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import Shapes, layer_norm, linear

_OPT = {
    **{
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "ffn_dim": 112,
    },
    **{
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "dtype": "float32",
}

VARIANTS: dict[str, dict[str, Any]] = {
    "opt_125m": _OPT,
    "opt_350m": {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "opt_1.3b": {**_OPT, "hidden_size": 96, "num_attention_heads": 6, "word_embed_proj_dim": 96},
}
ALL_LENGTHS = tuple(VARIANTS)


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, ffn, size = (
        config["hidden_size"],
        config["ffn_dim"],
        config.get("word_embed_proj_dim") or config["hidden_size"],
    )
    found: Shapes = {
        "model.decoder.embed_tokens.weight": (config["vocab_size"], size),
        "model.decoder.embed_positions.weight": (config["max_position_embeddings"] + 2, hidden),
    }
    if size != hidden:
        found |= {
            "model.decoder.project_in.weight": (hidden, size),
            "model.decoder.project_out.weight": (size, hidden),
        }
    for index in range(config["num_hidden_layers"]):
        name = f"model.decoder.layers.{index}"
        for part in ("q", "k", "v", "out"):
            found |= linear(f"{name}.self_attn.{part}_proj", hidden, hidden, True)
        found |= linear(f"{name}.fc1", ffn, hidden, True) | linear(f"{name}.fc2", hidden, ffn, True)
        found |= layer_norm(f"{name}.self_attn_layer_norm", hidden) | layer_norm(
            f"{name}.final_layer_norm", hidden
        )
    return found | (
        layer_norm("model.decoder.final_layer_norm", hidden)
        if config.get("do_layer_norm_before", True)
        else {}
    )
