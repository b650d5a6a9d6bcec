"""Phi-3.5-MoE: Mixtral with layer norms, biases, and experts chosen by SparseMixer (Liu et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig
from jengine.models.config_parts import OutputHead
from jengine.models.family import Family, Fields
from jengine.models.hf_config import attention_biases, decoder, rope_fields, window_everywhere
from jengine.models.layers import Block, LayerNorm, dense
from jengine.models.llama import Llama
from jengine.models.moe import Experts, MixtureOfExperts


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
    norm_type = LayerNorm

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return SparseMixer(config, dtype, f"{name}.block_sparse_moe", ("w1", "w3", "w2"))


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
    experts = MixtureOfExperts(
        layers=tuple(range(fields["num_layers"])),
        count=int(hf.get("num_local_experts", 16)),
        per_token=2,
        size=fields["intermediate_size"],
    )
    return {
        **fields,
        **attention_biases(hf),
        **window_everywhere(hf, hf.get("sliding_window")),
        "head": OutputHead(bias=bool(hf.get("lm_head_bias", False))),
        "parts": (experts, Competition(jitter=float(hf.get("router_jitter_noise", 0.01)))),
    }


DEFAULTS = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "phimoe": Family("Phi-3.5-MoE", PhiMoe, read_phi_moe, DEFAULTS, parts=(MixtureOfExperts, Competition))
}
