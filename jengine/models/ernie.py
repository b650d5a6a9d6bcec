"""ERNIE 4.5: adjacent channels rotate together. Experts are chosen by a corrected softmax, in addition to
shared ones.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig
from jengine.models.deepseek import DeepseekExperts
from jengine.models.family import Family, Fields
from jengine.models.glm import GlmAttention
from jengine.models.hf_config import decoder
from jengine.models.layers import Block, param
from jengine.models.llama import Llama
from jengine.models.moe import MixtureOfExperts, has_experts
from jengine.models.pieces import Piece


class ErnieExperts(DeepseekExperts):
    def declare(self, dtype: jax.typing.DTypeLike, name: str) -> None:
        super().declare(dtype, name)
        experts = self.sizes.count
        correction = Piece(f"{name}.moe_statics.e_score_correction_bias", (1, experts))
        self.correction = param((experts,), jnp.float32, (None,), correction)


class Ernie(Llama):
    attention = GlmAttention

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        if not has_experts(config, index):
            return super().mlp(config, dtype, name, index)
        return ErnieExperts(config, dtype, f"{name}.mlp")


def read_ernie(hf: Fields) -> dict[str, Any]:
    bias = bool(hf.get("use_bias", False))
    return {**decoder(hf), "qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


def read_ernie_moe(hf: Fields) -> dict[str, Any]:
    if hf.get("use_bias"):
        raise ModelError("use_bias=true is not supported with experts")
    fields = read_ernie(hf)
    first, last, every = (int(hf[f"moe_layer_{name}"]) for name in ("start_index", "end_index", "interval"))
    last = fields["num_layers"] - 1 if last == -1 else last
    # has a default, so the other name comes first
    size, chosen = int(hf["moe_intermediate_size"]), int(hf["moe_k"])
    experts = MixtureOfExperts(
        layers=tuple(i for i in range(fields["num_layers"]) if first <= i <= last and (i + 1) % every == 0),
        count=int(hf["moe_num_experts"]),
        per_token=int(hf.get("num_experts_per_tok") or chosen),
        size=size,
        shared_size=size * int(hf["moe_num_shared_experts"]),
        normalize=True,
    )
    return {**fields, "parts": (experts,)}


SHARED = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 5e5,
}
DEFAULTS = {**SHARED, "head_dim": 128}
MOE_DEFAULTS = {
    **{
        **SHARED,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
    },
    **{"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
}
AHEAD = ("model.mtp_",)  # multi-token prediction (MTP)
FAMILIES = {
    "ernie4_5": Family("ERNIE 4.5 (dense)", Ernie, read_ernie, DEFAULTS, skipped=AHEAD),
    "ernie4_5_moe": Family(
        "ERNIE 4.5 with experts",
        Ernie,
        read_ernie_moe,
        MOE_DEFAULTS,
        skipped=AHEAD,
        parts=(MixtureOfExperts,),
    ),
}
