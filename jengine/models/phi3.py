"""Phi-3 and 3.5, Phi-4 mini: Llama whose checkpoints have fused projections."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jengine.config import ModelConfig
from jengine.models.layers import Attention, Block, GatedMlp
from jengine.models.llama import Llama
from jengine.models.pieces import Part, Piece, stacked


class Phi3Attention(Attention):
    def qkv_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        return stacked(f"{name}.qkv_proj.{kind}", parts, *inputs)


class Phi3Mlp(GatedMlp):
    def gate_up_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        return stacked(f"{name}.gate_up_proj.{kind}", parts, *inputs)


class Phi3(Llama):
    attention = Phi3Attention

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return Phi3Mlp(config, dtype, f"{name}.mlp")
