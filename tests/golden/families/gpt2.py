"""GPT-2."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import Shapes, layer_norm

_GPT2 = {
    **{
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 96,
        "n_embd": 64,
        "n_inner": 112,
        "n_layer": 2,
    },
    **{
        "n_head": 4,
        "n_positions": 256,
        "activation_function": "gelu_new",
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "dtype": "float32",
}

VARIANTS: dict[str, dict[str, Any]] = {"gpt2": _GPT2}
ALL_LENGTHS = tuple(VARIANTS)


def shapes(config: dict[str, Any]) -> Shapes:
    """Matrices are stored [in, out]."""
    hidden, ffn = config["n_embd"], config["n_inner"]
    found: Shapes = {
        "transformer.wte.weight": (config["vocab_size"], hidden),
        "transformer.wpe.weight": (config["n_positions"], hidden),
    }
    products = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, ffn),
        "mlp.c_proj": (ffn, hidden),
    }
    for index in range(config["n_layer"]):
        name = f"transformer.h.{index}"
        for product, shape in products.items():
            found |= {f"{name}.{product}.weight": shape, f"{name}.{product}.bias": shape[1:]}
        found |= layer_norm(f"{name}.ln_1", hidden) | layer_norm(f"{name}.ln_2", hidden)
    return found | layer_norm("transformer.ln_f", hidden)
