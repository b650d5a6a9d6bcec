"""StarCoder2."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, attention, decoder, layer_norm, linear

_STARCODER2 = {
    **{
        **SMALL,
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "use_bias": True,
    },
    "tie_word_embeddings": True,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "starcoder2": _STARCODER2,
    "starcoder2_window": {
        **_STARCODER2,
        "sliding_window": 40,
        "use_bias": False,
        "tie_word_embeddings": False,
    },
}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, ffn, bias = config["hidden_size"], config["intermediate_size"], config["use_bias"]

    def layer(name: str, index: int) -> Shapes:
        mlp = linear(f"{name}.mlp.c_fc", ffn, hidden, bias) | linear(f"{name}.mlp.c_proj", hidden, ffn, bias)
        return attention(f"{name}.self_attn", config, bias=bias) | mlp

    return decoder(config, layer, norm=layer_norm)
