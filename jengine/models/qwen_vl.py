"""The text models of Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3 with positions of three numbers, and with what
DeepStack adds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields, TextPart
from jengine.models.hf_config import interleaved
from jengine.models.layers import Block, exact_matrix
from jengine.models.llama import Llama, read_qwen2
from jengine.models.moe import Experts, MixtureOfExperts, has_experts, read_qwen3_moe
from jengine.models.pieces import EVERY, Piece
from jengine.models.qwen3 import Qwen3, read_qwen3


class StackedExperts(Experts):
    """Checkpoints store all experts in one tensor: published ones as [experts, in, out], those that
    transformers 5 saves as [experts, out, in]. transformers prefers the latter where both shapes fit.
    """

    def declare(self, dtype: jax.typing.DTypeLike, name: str) -> None:
        config, experts, ffn = self.config, self.sizes.count, self.sizes.size
        hidden, every, real = config.hidden_size, self.real, slice(0, ffn)
        both = Piece(f"{name}.experts.gate_up_proj", (experts, hidden, 2 * ffn), transposed=True, either=True)
        halves = (
            both._replace(part=(every, real, i), rows=(EVERY, slice(i * ffn, (i + 1) * ffn)))
            for i in range(2)
        )
        down = Piece(
            f"{name}.experts.down_proj",
            (experts, ffn, hidden),
            (every, EVERY, real),
            transposed=True,
            either=True,
        )
        router = Piece(f"{name}.gate.weight", (experts, hidden))
        self.router = exact_matrix((experts, hidden), dtype, (None, None), router)
        self.hold(dtype, halves, [down])


class Qwen3VlMoe(Qwen3):
    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        if not has_experts(config, index):
            return super().mlp(config, dtype, name, index)
        return StackedExperts(config, dtype, f"{name}.mlp")


def read_qwen3_vl(hf: Fields) -> dict[str, Any]:
    return interleaved(read_qwen3(hf), SECTIONS)


def read_qwen3_vl_moe(hf: Fields) -> dict[str, Any]:
    fields = interleaved(read_qwen3_moe(hf), SECTIONS)
    experts = replace(next(part for part in fields["parts"]), normalize=True)
    return {**fields, "parts": (experts,)}


IMAGES = ("visual.",)
SECTIONS = (24, 20, 20)  # transformers' default
DEFAULTS = {"head_dim": 128, "max_position_embeddings": 128000}
FAMILIES = {
    "qwen2_5_vl": Family(
        "Qwen2.5-VL",
        Llama,
        read_qwen2,
        text_part=TextPart(("qwen2_5_vl_text",), IMAGES, inline=True),
    ),
    "qwen3_vl": Family("Qwen3-VL", Qwen3, read_qwen3_vl, DEFAULTS, TextPart(("qwen3_vl_text",), IMAGES)),
    "qwen3_vl_moe": Family(
        "Qwen3-VL with experts",
        Qwen3VlMoe,
        read_qwen3_vl_moe,
        DEFAULTS,
        TextPart(("qwen3_vl_moe_text",), IMAGES),
        parts=(MixtureOfExperts,),
    ),
}
