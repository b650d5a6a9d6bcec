"""Multi-head latent attention (DeepSeek-V2, 2024), and the families that have it: DeepSeek V2 and V3, R1,
Kimi K2 and GLM-4.7-Flash, with many small experts in addition to shared ones.

All heads' keys and values are computed from one short, cached vector per token. The matrices that expand the
vector to keys and values are applied to queries and results instead ("absorbed"). So heads attend to the
cached vectors directly: there are as many query heads, and one kv head, whose value is the first channels of
its key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.base.errors import ModelError
from jengine.models.cache import TOKENS, CacheEntry, PageArray, Queries
from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import decoder, rope_fields
from jengine.models.layers import Attend, Matrix, RMSNorm, dense, matrix, param, row_parallel_dense
from jengine.models.llama import Llama
from jengine.models.moe import Experts, MixtureOfExperts
from jengine.models.pieces import EVERY, Piece
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.qkv import Qkv
from pallas_kernels.devices import traced_batch_invariant, traced_for_cpu
from pallas_kernels.elementwise.rotary import Rotation, rotate_by_xla
from pallas_kernels.products.weights import product

NORM_EPS = 1e-6  # for compressed queries and cached vectors, independent of the model's eps


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: caches one vector per token, from which the keys and values of all heads
    are computed.

    Attributes:
        rank: channels of that vector, without the rotating ones.
        query_rank: channels of the corresponding vector for queries, which is not cached; None: queries are
            computed from hidden states.
        key_dim: non-rotating channels of a head's query and key.
        rotary_dim: rotating channels. All heads share the key's, which are cached too.
        value_dim: channels of a head's value.
        interleaved: whether channels rotate with their neighbours in the checkpoint.
    """

    rank: int
    query_rank: int | None
    key_dim: int
    rotary_dim: int
    value_dim: int
    interleaved: bool = True

    @property
    def query_dim(self) -> int:
        """Channels of a head's query."""
        return self.key_dim + self.rotary_dim

    @property
    def cached_dim(self) -> int:
        """Channels cached for a token."""
        return self.rank + self.rotary_dim


class MultiHeadLatentAttention(nnx.Module):
    q_down: Matrix | None = None  # for compressed queries
    q_norm: RMSNorm | None = None

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        self.config, self.latent = config, config.part(LatentAttention)
        latent = self.latent
        heads = config.num_heads
        hidden = config.hidden_size
        laid = config.padded(config.num_heads)
        eps = dataclasses.replace(config, norm_eps=NORM_EPS)
        inputs, up = hidden, "q_proj"
        if latent.query_rank is not None:
            inputs, up = latent.query_rank, "q_b_proj"
            down = Piece(f"{name}.q_a_proj.weight", (inputs, hidden))
            self.q_down = matrix((inputs, hidden), dtype, (None, None), down)
            self.q_norm = RMSNorm(inputs, eps, dtype, f"{name}.q_a_layernorm")
        queries = _queries(latent, Piece(f"{name}.{up}.weight", (heads * latent.query_dim, inputs)), heads)
        self.q = matrix((laid, latent.query_dim, inputs), dtype, ("heads", None, None), *queries)
        cached = Piece(f"{name}.kv_a_proj_with_mqa.weight", (latent.cached_dim, hidden))
        self.kv_down = matrix(
            (latent.cached_dim, hidden), dtype, (None, None), *_rotated_last(latent, cached, latent.rank)
        )
        self.kv_norm = RMSNorm(latent.rank, eps, dtype, f"{name}.kv_a_layernorm")
        expanded = latent.key_dim + latent.value_dim
        source = Piece(f"{name}.kv_b_proj.weight", (heads * expanded, latent.rank), (slice(0, heads),))
        self.kv_up = param(
            (laid, expanded, latent.rank), dtype, ("heads", None, None), source, multiplies=True
        )
        out = Piece(
            f"{name}.o_proj.weight",
            (hidden, heads * latent.value_dim),
            (EVERY, slice(0, heads * latent.value_dim)),
        )
        self.o = matrix((hidden, laid * latent.value_dim), dtype, (None, "heads"), out)

    def __call__(self, layer: int, x: jax.Array, rotation: Rotation | None, attend: Attend) -> jax.Array:
        """x [N, hidden] -> [N, hidden]."""
        assert rotation is not None and self.config.attention_scale is not None
        latent = self.latent
        inputs = x if self.q_down is None or self.q_norm is None else self.q_norm(dense(x, self.q_down[...]))
        q = dense(inputs, self.q[...])  # [N, heads, key_dim + rotary_dim]
        cached = dense(x, self.kv_down[...])
        keys, values = jnp.split(self.kv_up[...], [latent.key_dim], axis=1)
        q_latent = _by_head(q[..., : latent.key_dim], jnp.swapaxes(keys, 1, 2))
        q = jnp.concatenate([q_latent, rotate_by_xla(q[..., latent.key_dim :], rotation)], axis=-1)
        k_rotated = rotate_by_xla(cached[:, None, latent.rank :], rotation)
        k = jnp.concatenate([self.kv_norm(cached[:, : latent.rank])[:, None], k_rotated], axis=-1)
        options = AttentionOptions(self.config.attention_scale)
        y = attend(layer, Qkv(q, k, k[..., : latent.rank]), None, options)
        return row_parallel_dense(_by_head(y, values).reshape(x.shape[0], -1), self.o[...])

    def cache(self, layer: int) -> CacheEntry:
        """One vector of each token, on each device."""
        latent, config = self.latent, self.config
        heads = config.padded(config.num_heads) // config.shards
        return CacheEntry(
            kind="latent",
            arrays=(PageArray((1, TOKENS, latent.cached_dim), sharded=None),),
            operations=2 * config.num_heads * (latent.cached_dim + latent.rank),
            channels=6 * 3 * heads * latent.query_dim,
            queries=Queries(heads=heads, dim=latent.cached_dim, rank=latent.rank),
        )


def _by_head(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A product for each head, summed in float32: x [N, heads, in], weight [heads, out, in] -> [N, heads,
    out].
    """
    if traced_for_cpu() and traced_batch_invariant():  # XLA's own product may sum a row by its place
        y: jax.Array = lax.map(lambda pair: product(*pair), (jnp.moveaxis(x, 1, 0), weight))
        return jnp.moveaxis(y, 0, 1)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jnp.einsum("nhi,hoi->nho", x, weight, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def _queries(latent: LatentAttention, piece: Piece, heads: int) -> Iterator[Piece]:
    """The pieces of the checkpoint's rows of queries, for a parameter [heads, query_dim, in]."""
    if not latent.interleaved:
        yield piece._replace(part=(slice(0, heads),))
        return
    for head in range(heads):
        start, single = head * latent.query_dim, slice(head, head + 1)
        for part in _rotated_last(latent, piece, latent.key_dim, start):
            yield part._replace(part=(single, *part.part))


def _rotated_last(latent: LatentAttention, piece: Piece, plain: int, start: int = 0) -> Iterator[Piece]:
    """The pieces of rows from `start` on; rows after the first `plain` rotate.

    In the checkpoint adjacent rows rotate together, here rows that are half of rotary_dim apart.
    """
    half, end = latent.rotary_dim // 2, start + plain + latent.rotary_dim
    if not latent.interleaved:
        yield piece._replace(part=(slice(0, plain + 2 * half),), rows=slice(start, end))
        return
    yield piece._replace(part=(slice(0, plain),), rows=slice(start, start + plain))
    for odd in range(2):
        to = plain + odd * half
        yield piece._replace(part=(slice(to, to + half),), rows=slice(start + plain + odd, end, 2))


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

    def declare(self, dtype: jax.typing.DTypeLike, name: str) -> None:
        super().declare(dtype, name)
        self.routing = self.config.find(GroupRouting) or GroupRouting()
        if self.routing.scores == "sigmoid":
            bias = Piece(f"{name}.{self.correction_name}", (self.sizes.count,))
            self.correction = param((self.sizes.count,), jnp.float32, (None,), bias)

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


class Deepseek(Llama):
    attention, experts = MultiHeadLatentAttention, DeepseekExperts


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
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 0, "n_shared_experts": 2,
}  # fmt: skip
V3 = {
    **V2, "first_k_dense_replace": 3, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
GLM = {
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "first_k_dense_replace": 1, "n_shared_experts": 1, "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
}  # fmt: skip


FAMILIES = {
    "deepseek_v2": Family("DeepSeek V2, V2.5, Coder V2", Deepseek, read_v2, V2, parts=PARTS),
    "deepseek_v3": Family("DeepSeek V3, R1", Deepseek, read_v3, V3, skipped=AHEAD, parts=PARTS),
    "glm4_moe_lite": Family("GLM-4.7-Flash", Deepseek, read_v3, GLM, skipped=AHEAD, parts=PARTS),
    "kimi_k2": Family("Kimi K2", Deepseek, read_v3, V3, skipped=AHEAD, parts=PARTS),
}
