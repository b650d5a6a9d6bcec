"""GLM-4 and ERNIE 4.5: adjacent channels rotate together. GLM's gate and up are fused; GLM-4-0414 also norms
the results of attention and MLP. Experts as DeepSeek V3's: GLM-4.5 and later, and ERNIE's, chosen by a
corrected softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig
from jengine.models.deepseek import AHEAD, DeepseekExperts, GroupRouting, corrected_experts
from jengine.models.family import Family, Fields
from jengine.models.hf_config import decoder, partly_rotated
from jengine.models.layers import Attention, Mixer, param
from jengine.models.llama import Llama
from jengine.models.moe import MixtureOfExperts
from jengine.models.phi3 import Phi3Mlp
from jengine.models.pieces import Part, Piece, apart, interleaved
from jengine.models.qwen import Qwen3Attention
from jengine.models.residuals import SandwichLayer


class GlmAttention(Attention):
    def qkv_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        dim = self.config.head_dim
        q, k = (interleaved(part, dim, self.config.rope.dim or dim) for part in parts[:2])
        return apart([f"{name}.{p}_proj.{kind}" for p in "qkv"], (q, k, parts[2]), *inputs)


class Glm(Llama):
    attention, gated_mlp = GlmAttention, Phi3Mlp


class Glm4(Glm):
    layer_type = SandwichLayer
    norm_names = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )


class Glm4Moe(Llama):
    experts = DeepseekExperts

    def mixer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Mixer:
        return (Qwen3Attention if config.qk_norm else Attention)(config, dtype, f"{name}.self_attn")


def read_glm(hf: Fields) -> dict[str, Any]:
    return {**partly_rotated(hf, 0.5), "qkv_bias": bool(hf["attention_bias"])}


def read_glm4_moe(hf: Fields) -> dict[str, Any]:
    return {
        **partly_rotated(hf, 0.5),
        "parts": corrected_experts(hf),
        "qkv_bias": bool(hf.get("attention_bias", False)),
        "qk_norm": bool(hf.get("use_qk_norm", False)),
    }


DEFAULTS = {
    "attention_bias": True, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7,
}  # fmt: skip
MOE_DEFAULTS = {
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "n_routed_experts": 128,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
}  # fmt: skip
PARTS = (MixtureOfExperts, GroupRouting)


class ErnieExperts(DeepseekExperts):
    def declare(self, dtype: jax.typing.DTypeLike, name: str) -> None:
        super().declare(dtype, name)
        experts = self.sizes.count
        correction = Piece(f"{name}.moe_statics.e_score_correction_bias", (1, experts))
        self.correction = param((experts,), jnp.float32, (None,), correction)


class Ernie(Llama):
    attention, experts = GlmAttention, ErnieExperts


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


ERNIE_SHARED = {
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 5e5,
}  # fmt: skip
ERNIE_DEFAULTS = {**ERNIE_SHARED, "head_dim": 128}
ERNIE_MOE_DEFAULTS = {
    **ERNIE_SHARED, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}  # fmt: skip
ERNIE_AHEAD = ("model.mtp_",)  # multi-token prediction (MTP)


FAMILIES = {
    "ernie4_5": Family("ERNIE 4.5 (dense)", Ernie, read_ernie, ERNIE_DEFAULTS, skipped=ERNIE_AHEAD),
    "ernie4_5_moe": Family(
        "ERNIE 4.5 with experts",
        Ernie,
        read_ernie_moe,
        ERNIE_MOE_DEFAULTS,
        skipped=ERNIE_AHEAD,
        parts=(MixtureOfExperts,),
    ),
    "glm": Family("GLM-4 (2024)", Glm, read_glm, DEFAULTS),
    "glm4": Family("GLM-4-0414, GLM-Z1", Glm4, read_glm, DEFAULTS),
    "glm4_moe": Family("GLM-4.5, 4.6, 4.7", Glm4Moe, read_glm4_moe, MOE_DEFAULTS, skipped=AHEAD, parts=PARTS),
}
