"""Qwen2 and Qwen3, with experts too, and the text models of Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields, TextPart
from jengine.models.hf_config import (
    attention_biases,
    decoder,
    interleaved,
    window_everywhere,
    windows_by_layer_types,
)
from jengine.models.layers import Attention, RMSNorm
from jengine.models.llama import Llama
from jengine.models.moe import Experts, MixtureOfExperts, SharedExperts, qwen_experts
from pallas_kernels.cache.qkv import HeadNorm, QkvProduct


class Qwen3Attention(Attention):
    """Attention with norms of queries and keys per head."""

    norm_names = "q_norm", "k_norm"  # in the checkpoint

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        super().__init__(config, dtype, name)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config, dtype, f"{name}.{norm}") for norm in self.norm_names
        )

    def normalize(self, qkv: QkvProduct) -> QkvProduct:
        q, k = self.q_norm, self.k_norm
        return replace(qkv, norm=HeadNorm(q.weight[...], k.weight[...], q.eps, q.offset))


class StackedExperts(Experts):
    """Checkpoints store all experts in one tensor: published ones as [experts, in, out], those that
    transformers 5 saves as [experts, out, in]. transformers prefers the latter where both shapes fit.
    """

    stacked = "experts.gate_up_proj", "experts.down_proj"
    transposed = either = True


class Qwen2Moe(Llama):
    experts = SharedExperts


class Qwen3(Llama):
    attention = Qwen3Attention


class Qwen3VlMoe(Qwen3):
    experts = StackedExperts


def _windows(hf: Fields, types: list[str]) -> dict[str, Any]:
    window = hf.get("sliding_window", 4096)  # present in many configurations that do not use it
    return windows_by_layer_types(hf, window if hf.get("use_sliding_window") else None, types)


def qwen_windows(hf: Fields) -> dict[str, Any]:
    layers, first = int(hf["num_hidden_layers"]), int(hf.get("max_window_layers", 28))
    types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    return _windows(hf, types)


def read_qwen2(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), **qwen_windows(hf), "qkv_bias": True}


def read_qwen3(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), **qwen_windows(hf), **attention_biases(hf)}


def read_qwen2_moe(hf: Fields) -> dict[str, Any]:
    layers, last = int(hf["num_hidden_layers"]), int(hf.get("max_window_layers", 28))
    types = ["full_attention" if i % 2 or i >= last else "sliding_attention" for i in range(layers)]
    experts = qwen_experts(hf, hf.get("num_experts", 60), per_token=4, size=1408, shared_size=5632)
    bias = bool(hf.get("qkv_bias", True))
    return {**decoder(hf), **_windows(hf, types), "qkv_bias": bias, "parts": (experts,)}


def read_qwen3_moe(hf: Fields) -> dict[str, Any]:
    window = hf.get("sliding_window", 4096)
    count = hf.get("num_experts") or hf.get("num_local_experts", 128)
    experts = qwen_experts(hf, count, per_token=8, size=768)
    windows = window_everywhere(hf, window if hf.get("use_sliding_window") else None)
    return {**decoder(hf), **attention_biases(hf), **windows, "parts": (experts,)}


def read_qwen3_vl(hf: Fields) -> dict[str, Any]:
    return interleaved(read_qwen3(hf), SECTIONS)


def read_qwen3_vl_moe(hf: Fields) -> dict[str, Any]:
    fields = interleaved(read_qwen3_moe(hf), SECTIONS)
    (experts,) = fields["parts"]
    return {**fields, "parts": (replace(experts, normalize=True),)}


IMAGES = ("visual.",)
SECTIONS = (24, 20, 20)  # transformers' default
VL_DEFAULTS = {"head_dim": 128, "max_position_embeddings": 128000}
PARTS = (MixtureOfExperts,)
FAMILIES = {
    "qwen2": Family("Qwen2, Qwen2.5", Llama, read_qwen2),
    "qwen2_5_vl": Family(
        "Qwen2.5-VL", Llama, read_qwen2, text_part=TextPart(("qwen2_5_vl_text",), IMAGES, inline=True)
    ),
    "qwen2_moe": Family(
        "Qwen1.5-MoE, Qwen2 with experts",
        Qwen2Moe,
        read_qwen2_moe,
        {"max_position_embeddings": 32768},
        parts=PARTS,
    ),
    "qwen3": Family("Qwen3", Qwen3, read_qwen3),
    "qwen3_moe": Family("Qwen3-MoE", Qwen3, read_qwen3_moe, parts=PARTS),
    "qwen3_vl": Family("Qwen3-VL", Qwen3, read_qwen3_vl, VL_DEFAULTS, TextPart(("qwen3_vl_text",), IMAGES)),
    "qwen3_vl_moe": Family(
        "Qwen3-VL with experts",
        Qwen3VlMoe,
        read_qwen3_vl_moe,
        VL_DEFAULTS,
        TextPart(("qwen3_vl_moe_text",), IMAGES),
        parts=PARTS,
    ),
}
