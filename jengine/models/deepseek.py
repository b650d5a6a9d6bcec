"""DeepSeek V2 and V3, R1, Kimi K2 and GLM-4.7-Flash: latent attention, and many small experts in addition to
shared ones.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import decoder, rope_fields
from jengine.models.latent_attention import LatentAttention, MultiHeadLatentAttention
from jengine.models.layers import Block, GatedMlp, Layer, RMSNorm, dense, param
from jengine.models.llama import Llama
from jengine.models.moe import Experts, MixtureOfExperts, has_experts
from jengine.models.pieces import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRouting:
    """How a router's results become experts.

    Attributes:
        scores: the function that turns results into scores.
        groups, groups_kept: experts form groups; a token chooses among those of its best groups_kept.
        scaling: multiplies the experts' results.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    groups_kept: int = 1
    scaling: float = 1.0


class DeepseekExperts(Experts):
    """Experts in groups: a token's experts come from its best groups.

    Scores are a softmax or sigmoids. A correction, if there is one, affects the choice of experts, but not
    their weights.
    """

    correction: nnx.Param[jax.Array] | None = None
    correction_name = "gate.e_score_correction_bias"
    shared: GatedMlp | None = None

    def declare(self, dtype: jax.typing.DTypeLike, name: str) -> None:
        super().declare(dtype, name)
        config, sizes = self.config, self.sizes
        self.routing = config.find(GroupRouting) or GroupRouting()
        if self.routing.scores == "sigmoid":
            bias = Piece(f"{name}.{self.correction_name}", (sizes.count,))
            self.correction = param((sizes.count,), jnp.float32, (None,), bias)
        if sizes.shared_size:
            shared = dataclasses.replace(config, intermediate_size=sizes.shared_size)
            self.shared = GatedMlp(shared, dtype, f"{name}.shared_experts")

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        routing, scores = self.routing, dense(x, self.router[...], dtype=jnp.float32)
        weights = jax.nn.sigmoid(scores) if routing.scores == "sigmoid" else jax.nn.softmax(scores)
        ranked = weights if self.correction is None else weights + self.correction[...]
        if routing.groups > 1:
            grouped = ranked.reshape(x.shape[0], routing.groups, -1)
            # a group's score is the sum of its best experts
            best = 1 if self.correction is None else min(2, grouped.shape[-1])
            groups = lax.top_k(lax.top_k(grouped, best)[0].sum(-1), routing.groups_kept)[1]
            allowed = jax.nn.one_hot(groups, routing.groups, dtype=jnp.bool_).any(1)
            ranked = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(ranked.shape)
        chosen = lax.top_k(ranked, self.sizes.per_token)[1]
        weights = jnp.take_along_axis(weights, chosen, axis=-1)
        if self.sizes.normalize:
            weights /= weights.sum(-1, keepdims=True) + 1e-20
        return weights * routing.scaling, chosen

    def own_part(self, x: jax.Array) -> jax.Array:
        y = super().own_part(x)
        return y if self.shared is None else y + self.shared.own_part(x)


class Deepseek(Llama):
    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        return Layer(
            RMSNorm(config.hidden_size, config, dtype, f"{name}.input_layernorm"),
            MultiHeadLatentAttention(config, dtype, f"{name}.self_attn"),
            RMSNorm(config.hidden_size, config, dtype, f"{name}.post_attention_layernorm"),
            self.mlp(config, dtype, name, index),
        )

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        if not has_experts(config, index):
            return super().mlp(config, dtype, name, index)
        return DeepseekExperts(config, dtype, f"{name}.mlp")


def read_deepseek(hf: Fields) -> dict[str, Any]:
    """The fields that all of these families share, without experts."""
    rope, heads, rank = rope_fields(hf), int(hf["num_attention_heads"]), hf["q_lora_rank"]
    latent = LatentAttention(
        rank=int(hf["kv_lora_rank"]),
        query_rank=None if rank is None else int(rank),
        key_dim=int(hf["qk_nope_head_dim"]),
        rotary_dim=int(hf["qk_rope_head_dim"]),
        value_dim=int(hf["v_head_dim"]),
        interleaved=bool(hf.get("rope_interleave", True)),
    )
    if latent.rotary_dim % 2:
        raise ModelError(f"qk_rope_head_dim={latent.rotary_dim} must be even, for rotary embedding")
    fields = decoder(hf, rope)
    return {
        **fields,
        "num_kv_heads": heads,
        "head_dim": latent.query_dim,
        "rope": dataclasses.replace(fields["rope"], dim=latent.rotary_dim),
        "parts": (latent,),
        "attention_scale": latent.query_dim**-0.5 * _magnitude(rope) ** 2,
    }


def read_experts(
    hf: Fields, scores: Literal["softmax", "sigmoid"], *, normalize: bool
) -> tuple[MixtureOfExperts, GroupRouting]:
    """Experts and their routing, by softmax or by sigmoids with a correction for the choice of experts."""
    experts, groups = int(hf["n_routed_experts"]), int(hf.get("n_group") or 1)
    if experts % groups:
        raise ModelError(f"n_routed_experts={experts} is not a multiple of n_group={groups}")
    sizes = MixtureOfExperts(
        layers=_expert_layers(hf, int(hf["num_hidden_layers"])),
        count=experts,
        per_token=int(hf["num_experts_per_tok"]),
        size=int(hf["moe_intermediate_size"]),
        shared_size=int(hf["moe_intermediate_size"]) * int(hf.get("n_shared_experts") or 0),
        normalize=normalize,
    )
    groups_kept, scaling = int(hf.get("topk_group") or 1), float(hf.get("routed_scaling_factor", 1.0))
    return sizes, GroupRouting(scores=scores, groups=groups, groups_kept=groups_kept, scaling=scaling)


def _magnitude(rope: dict[str, Any]) -> float:
    """The factor of queries, and of keys, from yarn's mscale_all_dim, for contexts beyond the trained one."""
    factor, weight = float(rope.get("factor") or 1.0), float(rope.get("mscale_all_dim") or 0.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return 1.0 if kind == "default" or not weight or factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _expert_layers(hf: Fields, layers: int) -> tuple[int, ...]:
    types = hf.get("mlp_layer_types")
    if types is not None:
        return tuple(i for i, kind in enumerate(types) if kind == "sparse")
    first, every = int(hf["first_k_dense_replace"]), int(hf.get("moe_layer_freq") or 1)
    return tuple(i for i in range(first, layers) if i % every == 0)


def read_v2(hf: Fields) -> dict[str, Any]:
    fields, method = read_deepseek(hf), hf.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"topk_method {method!r} is not supported; greedy and group_limited_greedy are")
    if hf.get("scoring_func", "softmax") != "softmax":
        raise ModelError(f"scoring_func {hf['scoring_func']!r} is not supported; softmax is")
    if hf.get("norm_topk_prob"):
        raise ModelError("norm_topk_prob=true is not supported with model_type deepseek_v2")
    experts, routing = read_experts(hf, "softmax", normalize=False)
    if method == "greedy":
        routing = dataclasses.replace(routing, groups=1, groups_kept=1)
    return {**fields, "parts": (*fields["parts"], experts, routing)}


def read_v3(hf: Fields) -> dict[str, Any]:
    fields = read_deepseek(hf)
    return {**fields, "parts": (*fields["parts"], *corrected_experts(hf))}


def corrected_experts(hf: Fields) -> tuple[MixtureOfExperts, GroupRouting]:
    """Experts chosen by sigmoids, with a correction."""
    for name, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if hf.get(name, value) != value:
            raise ModelError(f"{name} {hf[name]!r} is not supported; {value} is")
    return read_experts(hf, "sigmoid", normalize=bool(hf.get("norm_topk_prob", True)))


PARTS = (LatentAttention, MixtureOfExperts, GroupRouting)
AHEAD = ("model.layers.{num_layers}.",)  # multi-token prediction (MTP)
V2 = {
    **{
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    **{"first_k_dense_replace": 0, "n_shared_experts": 2},
}
V3 = {
    **V2,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
GLM = {
    **{
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
    },
    **{"first_k_dense_replace": 1, "n_shared_experts": 1, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8},
}
FAMILIES = {
    "deepseek_v2": Family("DeepSeek V2, V2.5, Coder V2", Deepseek, read_v2, V2, parts=PARTS),
    "deepseek_v3": Family("DeepSeek V3, R1", Deepseek, read_v3, V3, skipped=AHEAD, parts=PARTS),
    "glm4_moe_lite": Family("GLM-4.7-Flash", Deepseek, read_v3, GLM, skipped=AHEAD, parts=PARTS),
    "kimi_k2": Family("Kimi K2", Deepseek, read_v3, V3, skipped=AHEAD, parts=PARTS),
}
