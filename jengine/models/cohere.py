"""StableLM, and Cohere's Command R and R+, Aya (cohere), Command R7B and A (cohere2): layer norms, of queries
and keys per head too; attention and MLP in parallel.

In Cohere's, adjacent channels rotate together. In cohere2, layers without a window do not rotate.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig, OutputHead
from jengine.models.family import Family, Fields
from jengine.models.glm import GlmAttention
from jengine.models.hf_config import (
    attention_biases,
    decoder,
    partly_rotated,
    rotated_in_windows,
    windows_but_every,
)
from jengine.models.layers import Attention, LayerNorm, param, standardized
from jengine.models.llama import Llama
from jengine.models.pieces import Piece, heads, qkv_parts
from jengine.models.residuals import ParallelLayer, ParallelResidual
from pallas_kernels.cache.qkv import Qkv, QkvProduct


class HeadLayerNorms(Attention):
    """With qk_norm, layer norms of queries and keys, with weights for each head and without biases."""

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        super().__init__(config, dtype, name)
        shape = (config.num_kv_heads_padded, (config.group_size_padded + 1) * config.head_dim)
        self.qk_norm = (
            param(shape, dtype, ("kv_heads", None), *self.qk_norm_source(name)) if config.qk_norm else None
        )

    def qk_norm_source(self, name: str) -> tuple[Piece, ...]:
        """The checkpoint tensors of the norms' weights."""
        dim = self.config.head_dim
        return tuple(
            Piece(f"{name}.{kind}_layernorm.norms.{head}.weight", (dim,), (laid, slice(row, row + dim)))
            for kind, part in zip("qk", qkv_parts(self.config)[:2], strict=True)
            for head, laid, row in heads(part, dim)
        )

    def normalize(self, qkv: QkvProduct) -> Qkv | QkvProduct:
        if self.qk_norm is None:
            return qkv
        q, k, v = qkv.split()
        ends = self.config.group_size_padded * self.config.head_dim
        weight = self.qk_norm[...].astype(jnp.float32)
        return Qkv(self._normed(q, weight[:, :ends]), self._normed(k, weight[:, ends:]), v)

    def _normed(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        y = standardized(x, self.config.norm_eps)
        return (y * weight.reshape(x.shape[1:])).astype(x.dtype)


class StableLm(Llama):
    attention, norm_type = HeadLayerNorms, LayerNorm


def read_stablelm(hf: Fields) -> dict[str, Any]:
    return {
        **partly_rotated(hf, 0.25),
        "norm_eps": float(hf.get("layer_norm_eps", 1e-5)),
        "qkv_bias": bool(hf.get("use_qkv_bias", False)),
        "qk_norm": bool(hf.get("qk_layernorm", False)),
        "parts": (ParallelResidual(shared_norm=True),) if hf.get("use_parallel_residual", False) else (),
    }


class CohereAttention(GlmAttention, HeadLayerNorms):
    """With qk_norm, queries and keys are normed per head. Their weights are in the order in which channels
    rotate.
    """

    def qk_norm_source(self, name: str) -> tuple[Piece, ...]:
        config, pieces = self.config, list[Piece]()
        dim, half = config.head_dim, config.head_dim // 2
        for kind, count, part in zip(
            "qk", (config.num_heads, config.num_kv_heads), qkv_parts(config)[:2], strict=True
        ):
            for head, laid, row in heads(part, dim):
                for i, start in enumerate((row, row + half)):  # even channels, then odd ones
                    rows = slice(head, head + 1), slice(i, dim, 2)
                    pieces.append(
                        Piece(
                            f"{name}.{kind}_norm.weight",
                            (count, dim),
                            (laid, slice(start, start + half)),
                            rows,
                        )
                    )
        return tuple(pieces)


class CohereNorm(LayerNorm):
    biased = False


class Cohere(Llama):
    attention, norm_type, layer_type = CohereAttention, CohereNorm, ParallelLayer
    norm_names = ("input_layernorm",)


def read_cohere(hf: Fields) -> dict[str, Any]:
    scale = float(hf["logit_scale"])
    if scale <= 0:
        raise ModelError(f"logit_scale={scale} must be above 0")
    return {
        **decoder(hf),
        **attention_biases(hf),
        "norm_eps": float(hf.get("layer_norm_eps", 1e-5)),
        "head": OutputHead(divisor=1 / scale),
        "qk_norm": bool(hf.get("use_qk_norm", False)),
    }


def read_cohere2(hf: Fields) -> dict[str, Any]:
    if hf.get("use_qk_norm"):
        raise ModelError("use_qk_norm=true is not supported; false is")
    pattern = int(hf.get("sliding_window_pattern") or 4)
    return rotated_in_windows(read_cohere(hf), windows_but_every(hf, int(hf["sliding_window"]), pattern))


COHERE = {"max_position_embeddings": 8192, "logit_scale": 0.0625, "tie_word_embeddings": True}


FAMILIES = {
    "cohere": Family("Command R, R+, Aya (Cohere)", Cohere, read_cohere, {**COHERE, "rope_theta": 5e5}),
    "cohere2": Family(
        "Command R7B, Command A (Cohere 2)", Cohere, read_cohere2, {**COHERE, "sliding_window": 4096}
    ),
    "stablelm": Family(
        "StableLM, StableLM 2",
        StableLm,
        read_stablelm,
        {"max_position_embeddings": 4096},
        parts=(ParallelResidual,),
    ),
}
