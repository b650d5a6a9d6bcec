"""GLM-4: adjacent channels rotate together, gate and up are fused. GLM-4-0414 also norms the results of
attention and MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import partly_rotated
from jengine.models.layers import Attention, Block, Layer, RMSNorm
from jengine.models.llama import Llama
from jengine.models.phi3 import Phi3Mlp
from jengine.models.pieces import Part, Piece, apart, interleaved
from jengine.models.residuals import SandwichLayer


class GlmAttention(Attention):
    def qkv_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        dim = self.config.head_dim
        q, k = (interleaved(part, dim, self.config.rope.dim or dim) for part in parts[:2])
        return apart([f"{name}.{p}_proj.{kind}" for p in "qkv"], (q, k, parts[2]), *inputs)


class Glm(Llama):
    attention = GlmAttention

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return Phi3Mlp(config, dtype, f"{name}.mlp")


class Glm4(Glm):
    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        def norm(place: str) -> RMSNorm:
            return RMSNorm(config.hidden_size, config, dtype, f"{name}.{place}_layernorm")

        return SandwichLayer(
            norm("input"),
            self.attention(config, dtype, f"{name}.self_attn"),
            norm("post_self_attn"),
            norm("post_attention"),
            self.mlp(config, dtype, name, index),
            norm("post_mlp"),
        )


def read_glm(hf: Fields) -> dict[str, Any]:
    return {**partly_rotated(hf, 0.5), "qkv_bias": bool(hf["attention_bias"])}


DEFAULTS = {
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
}
FAMILIES = {
    "glm": Family("GLM-4 (2024)", Glm, read_glm, DEFAULTS),
    "glm4": Family("GLM-4-0414, GLM-Z1", Glm4, read_glm, DEFAULTS),
}
