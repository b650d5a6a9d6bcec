"""StableLM: Llama with LayerNorm and partial rotation. StableLM 2 12B: norms per head, parallel attention and
MLP.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import partly_rotated
from jengine.models.layers import Attention, Layer, LayerNorm, param
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
        y = x.astype(jnp.float32)
        y -= jnp.mean(y, axis=-1, keepdims=True)
        y *= lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.config.norm_eps)
        return (y * weight.reshape(x.shape[1:])).astype(x.dtype)


class StableLm(Llama):
    attention = HeadLayerNorms
    norm_type = LayerNorm

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        if config.find(ParallelResidual) is None:
            return super().layer(config, dtype, name, index)
        norm = LayerNorm(config.hidden_size, config, dtype, f"{name}.input_layernorm")
        return ParallelLayer(
            norm,
            self.attention(config, dtype, f"{name}.self_attn"),
            norm,
            self.mlp(config, dtype, name, index),
        )


def read_stablelm(hf: Fields) -> dict[str, Any]:
    return {
        **partly_rotated(hf, 0.25),
        "norm_eps": float(hf.get("layer_norm_eps", 1e-5)),
        "qkv_bias": bool(hf.get("use_qkv_bias", False)),
        "qk_norm": bool(hf.get("qk_layernorm", False)),
        "parts": (ParallelResidual(shared_norm=True),) if hf.get("use_parallel_residual", False) else (),
    }


FAMILIES = {
    "stablelm": Family(
        "StableLM, StableLM 2",
        StableLm,
        read_stablelm,
        {"max_position_embeddings": 4096},
        parts=(ParallelResidual,),
    )
}
