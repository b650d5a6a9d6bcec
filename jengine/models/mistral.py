"""Mistral, Mixtral, and Ministral 3, whose queries are scaled by position. Mistral 3 is Mistral or Ministral
3 with images.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jengine.base.errors import ModelError
from jengine.models.family import Family, Fields, TextPart
from jengine.models.hf_config import decoder, rope_fields, window_everywhere
from jengine.models.layers import GATED_W, Attend
from jengine.models.llama import Llama
from jengine.models.moe import MixtureOfExperts, experts_everywhere
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.qkv import Qkv, QkvProduct, QueriesOnly
from pallas_kernels.elementwise.rotary import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """A query at position p is multiplied by 1 + beta * log(1 + p // the trained context)."""

    beta: float


class Mixtral(Llama):
    mlp_name, mlp_parts = "block_sparse_moe", GATED_W


class Ministral3(Llama):
    def attending(self, positions: jax.Array, attend: Attend) -> Attend:
        queries, scaling = self.config.find(QueryScaling), self.config.rope.scaling
        if queries is None or scaling is None:
            return attend
        scales = 1 + queries.beta * jnp.log(1.0 + positions // scaling.original_max_position)
        return scaled_queries(attend, scales, range(self.config.num_layers))


def scaled_queries(attend: Attend, scales: jax.Array, layers: Container[int]) -> Attend:
    """`attend` with queries that are multiplied by scales [N], in these layers."""

    scales = scales[:, None, None]

    def scaled(
        layer: int, qkv: Qkv | QkvProduct | QueriesOnly, rotation: Rotation | None, options: AttentionOptions
    ) -> jax.Array:
        assert not isinstance(qkv, QueriesOnly)
        if layer in layers:
            q, k, v = qkv.split()
            qkv = Qkv(q * scales.astype(q.dtype), k, v)
        return attend(layer, qkv, rotation, options)

    return scaled


def read_mistral(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), **window_everywhere(hf, hf.get("sliding_window"))}


def read_ministral3(hf: Fields) -> dict[str, Any]:
    rope = rope_fields(hf)
    beta = float(rope.pop("llama_4_scaling_beta"))
    rope.pop("max_position_embeddings", None)  # duplicates the model's field
    fields = decoder(hf, rope)
    if fields["rope"].scaling is None:
        raise ModelError(f"llama_4_scaling_beta={beta} is not supported without rope scaling")
    return {
        **fields,
        **window_everywhere(hf, hf.get("sliding_window")),
        "parts": (QueryScaling(beta=beta),) if beta else (),
    }


def read_mistral3(hf: Fields) -> dict[str, Any]:
    return (read_ministral3 if hf["model_type"] == "ministral3" else read_mistral)(hf)


def read_mixtral(hf: Fields) -> dict[str, Any]:
    fields = read_mistral(hf)
    experts = experts_everywhere(
        fields, hf.get("num_local_experts") or hf.get("num_experts", 8), hf.get("num_experts_per_tok", 2)
    )
    return {**fields, "parts": (experts,)}


MIXTRAL = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
MINISTRAL = {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5}
TEXT = TextPart(("mistral", "ministral3"), tied=True, tied_before_5=False)
FAMILIES = {
    "ministral3": Family("Ministral 3", Ministral3, read_ministral3, MINISTRAL, parts=(QueryScaling,)),
    "mistral": Family(
        "Mistral", Llama, read_mistral, {"max_position_embeddings": 131072, "sliding_window": 4096}
    ),
    "mistral3": Family(
        "Mistral 3 with images (its text model)",
        Ministral3,
        read_mistral3,
        text_part=TEXT,
        parts=(QueryScaling,),
    ),
    "mixtral": Family("Mixtral", Mixtral, read_mixtral, MIXTRAL, parts=(MixtureOfExperts,)),
}
