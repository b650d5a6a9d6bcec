"""Phi-1, 1.5 and 2: parallel attention and MLP with one norm; partial rotation; biases everywhere, including
the output head.
"""

from __future__ import annotations

from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.config_parts import OutputHead
from jengine.models.family import Family, Fields
from jengine.models.hf_config import partly_rotated
from jengine.models.layers import Attention, Layer, LayerNorm, Mlp
from jengine.models.llama import Llama
from jengine.models.pieces import Piece
from jengine.models.residuals import ParallelLayer


class PhiAttention(Attention):
    def output_source(self, name: str, kind: str, *shape: int) -> Piece:
        return Piece(f"{name}.dense.{kind}", shape)


class Phi(Llama):
    attention = PhiAttention
    norm_type, norm_name = LayerNorm, "final_layernorm"

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        norm = LayerNorm(config.hidden_size, config, dtype, f"{name}.input_layernorm")
        mlp = Mlp(config, dtype, f"{name}.mlp.fc1", f"{name}.mlp.fc2")
        return ParallelLayer(norm, self.attention(config, dtype, f"{name}.self_attn"), norm, mlp)


def read_phi(hf: Fields) -> dict[str, Any]:
    return {
        **partly_rotated(hf, 0.5),
        "norm_eps": float(hf.get("layer_norm_eps", 1e-5)),
        "head": OutputHead(bias=True),
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
    }


FAMILIES = {"phi": Family("Phi-1, Phi-1.5, Phi-2", Phi, read_phi, {"hidden_act": "gelu_new"})}
