"""MiniMax-M2: norms of queries and keys over all heads, partial rotation, experts chosen by corrected
sigmoids.
"""

from __future__ import annotations

from typing import Any

import jax

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig
from jengine.models.deepseek import AHEAD, DeepseekExperts, GroupRouting
from jengine.models.family import Family, Fields
from jengine.models.hf_config import partly_rotated
from jengine.models.layers import Block
from jengine.models.llama import Llama
from jengine.models.moe import MixtureOfExperts
from jengine.models.olmo import OlmoAttention


class MiniMaxExperts(DeepseekExperts):
    correction_name = "e_score_correction_bias"


class MiniMaxM2(Llama):
    attention = OlmoAttention

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return MiniMaxExperts(config, dtype, f"{name}.block_sparse_moe", ("w1", "w3", "w2"))


def read_minimax_m2(hf: Fields) -> dict[str, Any]:
    """Raises ModelError for settings that transformers does not implement either."""
    for name, value in (
        ("use_qk_norm", True),
        ("qk_norm_type", "per_layer"),
        ("scoring_func", "sigmoid"),
        ("use_routing_bias", True),
    ):
        if hf.get(name, value) != value:
            raise ModelError(f"{name}={hf[name]!r} is not supported; {value!r} is")
    if hf.get("shared_intermediate_size"):
        raise ModelError(f"shared_intermediate_size={hf['shared_intermediate_size']} is not supported; 0 is")
    if any(kind != 1 for kind in hf.get("attn_type_list") or []):
        raise ModelError("attn_type_list has another number than 1: lightning attention is not supported")
    share = float(hf["rotary_dim"]) / float(hf["head_dim"]) if hf.get("rotary_dim") else 1.0
    fields = partly_rotated(hf, share)
    experts = MixtureOfExperts(
        layers=tuple(range(fields["num_layers"])),
        count=int(hf["num_local_experts"]),
        per_token=int(hf["num_experts_per_tok"]),
        size=fields["intermediate_size"],
        normalize=True,
    )
    return {**fields, "parts": (experts, GroupRouting(scores="sigmoid"))}


DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
PARTS = (MixtureOfExperts, GroupRouting)
FAMILIES = {
    "minimax_m2": Family("MiniMax-M2, M2.1", MiniMaxM2, read_minimax_m2, DEFAULTS, skipped=AHEAD, parts=PARTS)
}
