"""Phi-3 and 3.5, Phi-4 mini: Llama whose checkpoints have fused projections."""

from __future__ import annotations

from collections.abc import Sequence

from jengine.models.layers import Attention, GatedMlp, Part, Piece, stacked
from jengine.models.llama import Llama


class Phi3Attention(Attention):
    def qkv_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        return stacked(f"{name}.qkv_proj.{kind}", parts, *inputs)


class Phi3Mlp(GatedMlp):
    def gate_up_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        return stacked(f"{name}.gate_up_proj.{kind}", parts, *inputs)


class Phi3(Llama):
    attention = Phi3Attention
    mlp = Phi3Mlp
