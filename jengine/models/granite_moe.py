"""Granite 3 with experts (1B-A400M, 3B-A800M), PowerMoE: Granite whose layers have experts, stored in one
tensor per matrix.
"""

from __future__ import annotations

from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.granite import Granite, ResidualMultiplier, read_granite
from jengine.models.layers import Block, exact_matrix
from jengine.models.moe import Experts, MixtureOfExperts
from jengine.models.pieces import EVERY, Piece


class GraniteExperts(Experts):
    def declare(self, dtype: jax.typing.DTypeLike, name: str) -> None:
        config, experts, ffn = self.config, self.sizes.count, self.sizes.size
        hidden = config.hidden_size
        every, real = self.real, slice(0, ffn)
        both = Piece(f"{name}.input_linear.weight", (experts, 2 * ffn, hidden))
        halves = (
            both._replace(part=(every, real, i), rows=(EVERY, slice(i * ffn, (i + 1) * ffn)))
            for i in range(2)
        )
        down = Piece(f"{name}.output_linear.weight", (experts, hidden, ffn), (every, EVERY, real))
        self.router = exact_matrix(
            (experts, hidden), dtype, (None, None), Piece(f"{name}.router.layer.weight", (experts, hidden))
        )
        self.hold(dtype, halves, [down])


class GraniteMoe(Granite):
    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return GraniteExperts(config, dtype, f"{name}.block_sparse_moe")


def read_granite_moe(hf: Fields) -> dict[str, Any]:
    fields = read_granite(hf)
    experts = MixtureOfExperts(
        layers=tuple(range(fields["num_layers"])),
        count=int(hf.get("num_local_experts", 8)),
        per_token=int(hf.get("num_experts_per_tok", 2)),
        size=fields["intermediate_size"],
        normalize=True,
    )
    return {**fields, "parts": (*fields["parts"], experts)}


FAMILIES = {
    "granitemoe": Family(
        "Granite 3 with experts", GraniteMoe, read_granite_moe, parts=(ResidualMultiplier, MixtureOfExperts)
    )
}
