"""Phi-3 and 3.5, Phi-4 mini: fused projections in checkpoints. Phi-3.5-MoE: layer norms, biases, and experts
chosen by SparseMixer (Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jengine.base.errors import ModelError
from jengine.models.config import OutputHead
from jengine.models.family import Family, Fields
from jengine.models.hf_config import attention_biases, decoder, partly_rotated, rope_fields, window_everywhere
from jengine.models.layers import GATED_W, Attention, GatedMlp, LayerNorm, dense
from jengine.models.llama import Llama
from jengine.models.moe import Experts, MixtureOfExperts, experts_everywhere
from jengine.models.pieces import Part, Piece, stacked


class Phi3Attention(Attention):
    def qkv_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        return stacked(f"{name}.qkv_proj.{kind}", parts, *inputs)


class Phi3Mlp(GatedMlp):
    def gate_up_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        return stacked(f"{name}.gate_up_proj.{kind}", parts, *inputs)


class Phi3(Llama):
    attention, gated_mlp = Phi3Attention, Phi3Mlp


def read_phi3(hf: Fields) -> dict[str, Any]:
    rope = rope_fields(hf)
    if "short_factor" in rope:  # earlier names are "su" and "yarn"
        rope["rope_type"] = "longrope"
    return {**partly_rotated(hf, 1.0, rope), **window_everywhere(hf, hf.get("sliding_window"))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Competition:
    """Experts whose scores are within a share of 2 jitter below the best one compete with it."""

    jitter: float


class SparseMixer(Experts):
    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The best expert, then the best of the others. Each weight is a softmax over the experts that
        compete with it.
        """
        scores = dense(x, self.router[...], dtype=jnp.float32)
        rest, weights, chosen = scores, [], []
        for _ in range(2):
            best, expert = rest.max(-1, keepdims=True), rest.argmax(-1)
            behind = (best - scores) / jnp.maximum(jnp.abs(scores), best) > 2 * self.config.part(
                Competition
            ).jitter
            weights.append(jax.nn.softmax(jnp.where(behind, -jnp.inf, rest)).max(-1))
            chosen.append(expert)
            rest = jnp.where(jax.nn.one_hot(expert, scores.shape[-1], dtype=jnp.bool_), -jnp.inf, rest)
        return jnp.stack(weights, -1), jnp.stack(chosen, -1)


class PhiMoe(Llama):
    norm_type, experts = LayerNorm, SparseMixer
    mlp_name, mlp_parts = "block_sparse_moe", GATED_W


def read_phi_moe(hf: Fields) -> dict[str, Any]:
    rope = rope_fields(hf)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "longrope"):
        raise ModelError(f"rope scaling {kind!r} is not supported; default and longrope are")
    magnitudes = {f"{part}_mscale": rope.pop(f"{part}_mscale", None) for part in ("short", "long")}
    fields = decoder(hf, rope)
    if kind == "longrope":
        for name, magnitude in magnitudes.items():
            if magnitude is None:
                raise ModelError(f"rope scaling has no {name}")
        fields["rope"] = replace(fields["rope"], scaling=replace(fields["rope"].scaling, **magnitudes))
    if int(hf["num_experts_per_tok"]) != 2:
        raise ModelError(f"num_experts_per_tok={hf['num_experts_per_tok']} is not supported; 2 is")
    experts = experts_everywhere(fields, hf.get("num_local_experts", 16), 2, normalize=False)
    return {
        **fields,
        **attention_biases(hf),
        **window_everywhere(hf, hf.get("sliding_window")),
        "head": OutputHead(bias=bool(hf.get("lm_head_bias", False))),
        "parts": (experts, Competition(jitter=float(hf.get("router_jitter_noise", 0.01)))),
    }


DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
MOE_DEFAULTS = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_experts_per_tok": 2,
}
PARTS = (MixtureOfExperts, Competition)
FAMILIES = {
    "phi3": Family("Phi-3, Phi-3.5, Phi-4 mini", Phi3, read_phi3, DEFAULTS),
    "phimoe": Family("Phi-3.5-MoE", PhiMoe, read_phi_moe, MOE_DEFAULTS, parts=PARTS),
}
