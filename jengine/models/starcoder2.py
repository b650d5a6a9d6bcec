"""StarCoder2: Llama with LayerNorm, biases and an ungated MLP."""

from __future__ import annotations

from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import decoder, window_everywhere
from jengine.models.layers import Block, LayerNorm, Mlp
from jengine.models.llama import Llama


class Starcoder2(Llama):
    norm_type = LayerNorm

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return Mlp(config, dtype, f"{name}.mlp.c_fc", f"{name}.mlp.c_proj")


def read_starcoder2(hf: Fields) -> dict[str, Any]:
    return {
        **decoder(hf),
        **window_everywhere(hf, hf.get("sliding_window")),
        "norm_eps": float(hf.get("norm_epsilon", 1e-5)),
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bool(hf.get("use_bias", True))),
    }


DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096, "tie_word_embeddings": True}
FAMILIES = {"starcoder2": Family("StarCoder2", Starcoder2, read_starcoder2, DEFAULTS)}
