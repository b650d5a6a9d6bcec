"""Nemotron 3 and 4, Minitron: LayerNorm with 1 added to its weights, an MLP with squared ReLU, partial
rotation.
"""

from __future__ import annotations

from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import attention_biases, partly_rotated
from jengine.models.layers import Block, LayerNorm, Mlp
from jengine.models.llama import Llama


class Nemotron(Llama):
    norm_type = LayerNorm

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return Mlp(config, dtype, f"{name}.mlp.up_proj", f"{name}.mlp.down_proj")


def read_nemotron(hf: Fields) -> dict[str, Any]:
    return {
        **partly_rotated(hf, 0.5),
        **attention_biases(hf),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "norm_eps": float(hf.get("norm_eps", 1e-5)),
        "norm_offset": 1.0,
    }


DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 4096}
FAMILIES = {"nemotron": Family("Nemotron (2024), Minitron", Nemotron, read_nemotron, DEFAULTS)}
