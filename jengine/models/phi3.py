"""Phi-3 and 3.5, Phi-4 mini: Llama with fused projections in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import partly_rotated, rope_fields, window_everywhere
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
    attention: type[Attention] = Phi3Attention

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return Phi3Mlp(config, dtype, f"{name}.mlp")


def read_phi3(hf: Fields) -> dict[str, Any]:
    rope = rope_fields(hf)
    if "short_factor" in rope:  # earlier names are "su" and "yarn"
        rope["rope_type"] = "longrope"
    return {**partly_rotated(hf, 1.0, rope), **window_everywhere(hf, hf.get("sliding_window"))}


FAMILIES = {
    "phi3": Family(
        "Phi-3, Phi-3.5, Phi-4 mini", Phi3, read_phi3, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    )
}
