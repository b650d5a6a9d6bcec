"""MiniMax-Text-01 and M1: lightning attention (linear attention with a decay for each head and layer), full
attention, experts. MiniMax-M2: norms of queries and keys over all heads, experts chosen by corrected
sigmoids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.base.errors import ModelError
from jengine.models.cache import CacheEntry
from jengine.models.config import ModelConfig
from jengine.models.deepseek import AHEAD, DeepseekExperts, GroupRouting
from jengine.models.family import Family, Fields
from jengine.models.hf_config import check_mixed, partly_rotated
from jengine.models.layers import (
    GATED_W,
    Attend,
    Layer,
    Mixer,
    Recur,
    Stream,
    dense,
    matrix,
    param,
    row_parallel_dense,
)
from jengine.models.llama import Llama
from jengine.models.moe import MixtureOfExperts, experts_everywhere
from jengine.models.olmo import OlmoAttention
from jengine.models.pieces import EVERY, Piece
from jengine.models.recurrent import LinearAttention, state_entry
from jengine.parallel.collectives import all_reduce, shard_index
from pallas_kernels.elementwise.activations import ACTIVATIONS
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.products.rows import array_of

EPSILON = 1e-6  # of the norm over all heads
FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualFactors:
    """Factors in layers whose residual stream is normed: of the stream, and of what is added to it.

    Attributes:
        full, linear: where attention is added, in layers with full and with linear attention.
        mlp: where an MLP is added.
    """

    full: tuple[float, float]
    linear: tuple[float, float]
    mlp: tuple[float, float]


class LightningAttention(nnx.Module):
    """Linear attention, a norm over all heads, and a gate. One product computes a head's query, key, value
    and gate.
    """

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> None:
        self.config, self.linear = config, config.part(LinearAttention)
        heads, dim, hidden = self.linear.key_heads, self.linear.key_dim, config.hidden_size
        laid, real, inner = config.padded(heads), slice(0, heads), heads * dim
        self.activation, self.heads, self.inner = config.activation, heads, inner
        self.slope = 1 - index / (config.num_layers - 1 + 1e-5) + 1e-5  # later layers forget less
        qkv = Piece(f"{name}.qkv_proj.weight", (3 * inner, hidden), (real, slice(0, 3 * dim)))
        gate = Piece(f"{name}.output_gate.weight", (inner, hidden), (real, slice(3 * dim, 4 * dim)))
        self.mixed = matrix((laid, 4 * dim, hidden), dtype, ("heads", None, None), qkv, gate)
        self.norm = param(
            (laid, dim), dtype, ("heads", None), Piece(f"{name}.norm.weight", (inner,), (real,))
        )
        out = Piece(f"{name}.out_proj.weight", (hidden, inner), (EVERY, slice(0, inner)))
        self.out = matrix((hidden, laid * dim), dtype, (None, "heads"), out)

    def __call__(self, layer: int, x: jax.Array, rotation: Rotation | None, attend: Attend) -> jax.Array:
        """x [N, hidden] -> [N, hidden]. The rotation is not used: only the recurrence depends on the order of
        tokens.
        """
        mixed = dense(x, self.mixed[...]).astype(jnp.float32)  # [N, heads, 4 * dim]
        dim = mixed.shape[-1] // 4
        q, k, v = jnp.split(ACTIVATIONS[self.activation](mixed[..., : 3 * dim]), 3, axis=-1)
        head = shard_index() * mixed.shape[1] + jnp.arange(1, mixed.shape[1] + 1)
        decay = jnp.broadcast_to(-self.slope * jnp.exp2(-8 / self.heads * head), mixed.shape[:2])
        y = cast(Recur, attend).recur(layer, q, k, v, decay, None)
        mean = all_reduce(jnp.sum(y * y, axis=(1, 2))) / self.inner  # padded heads are zero
        y *= lax.rsqrt(mean + EPSILON)[:, None, None] * self.norm[...].astype(jnp.float32)
        y *= jax.nn.sigmoid(mixed[..., 3 * dim :])
        return row_parallel_dense(y.reshape(x.shape[0], -1).astype(x.dtype), self.out[...])

    def cache(self, layer: int) -> CacheEntry:
        """A token's update and its query each use every element of the state."""
        return state_entry(self.config, self.linear, uses=4)


class MiniMaxLayer(Layer):
    """Norms the residual stream, not only what attention and MLP read."""

    factors: tuple[tuple[float, float], tuple[float, float]]

    def __call__(self, layer: int, x: Stream, rotation: Rotation | None, attend: Attend) -> jax.Array:
        (scale, added), (mlp_kept, mlp_added) = self.factors
        x = self.attention_norm(array_of(x))
        x = x * scale + self.attention(layer, x, rotation, attend) * added
        x = self.mlp_norm(x)
        return x * mlp_kept + self.mlp(x) * mlp_added


class MiniMax(Llama):
    layer_type = MiniMaxLayer
    mlp_name, mlp_parts = "block_sparse_moe", GATED_W

    def mixer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Mixer:
        if index in config.part(LinearAttention).layers:
            return LightningAttention(config, dtype, f"{name}.self_attn", index)
        return super().mixer(config, dtype, name, index)

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        layer, factors = super().layer(config, dtype, name, index), config.part(ResidualFactors)
        assert isinstance(layer, MiniMaxLayer)
        linear = index in config.part(LinearAttention).layers
        layer.factors = factors.linear if linear else factors.full, factors.mlp
        return layer


def read_converted(hf: Fields) -> dict[str, Any]:
    """The fields of repositories converted for transformers."""
    layers = int(hf["num_hidden_layers"])
    types: Sequence[str] = hf.get("layer_types") or [LINEAR if i % 2 else FULL for i in range(layers)]
    return _read(
        hf, types, {"full": "full_attn_{}_factor", "linear": "linear_attn_{}_factor", "mlp": "mlp_{}_factor"}
    )


def read_published(hf: Fields) -> dict[str, Any]:
    """The fields of MiniMax's repositories."""
    for name, value in (("postnorm", True), ("shared_intermediate_size", 0)):
        if (hf.get(name) or False) != value:
            raise ModelError(f"{name}={hf.get(name)!r} is not supported; {value!r} is")
    types = [FULL if kind else LINEAR for kind in hf["attn_type_list"]]
    names = {"full": "full_attention", "linear": "linear_attention", "mlp": "mlp"}
    fields = _read(hf, types, {part: f"layernorm_{name}_{{}}" for part, name in names.items()})
    if (hf.get("layer_types") or types) != types:
        raise ModelError(f"layer_types contradicts attn_type_list: {types}")
    return fields


def _read(hf: Fields, types: Sequence[str], factors: Mapping[str, str]) -> dict[str, Any]:
    """The fields that both spellings share.

    Args:
        factors: the names of the fields of ResidualFactors, with {} in place of alpha and beta.

    Raises:
        ModelError: a layer type or their number is not supported.
    """
    fields = partly_rotated(
        hf, float(hf["rotary_dim"]) / float(hf["head_dim"]) if hf.get("rotary_dim") else 1.0
    )
    layers, heads, dim = fields["num_layers"], fields["num_heads"], fields["head_dim"]
    check_mixed(types, layers, FULL, LINEAR, field="layer types")
    lightning = tuple(i for i, kind in enumerate(types) if kind == LINEAR)
    sizes = {"key_heads": heads, "value_heads": heads, "key_dim": dim, "value_dim": dim}
    pairs = {
        part: (float(hf.get(name.format("alpha"), 1.0)), float(hf.get(name.format("beta"), 1.0)))
        for part, name in factors.items()
    }
    experts = experts_everywhere(fields, hf.get("num_local_experts", 8), hf.get("num_experts_per_tok", 2))
    return {
        **fields,
        "parts": (LinearAttention(layers=lightning, **sizes, taps=0), ResidualFactors(**pairs), experts),
    }


def constants(config: ModelConfig) -> frozenset[str]:
    """Names of tensors that checkpoints may contain: decays, which follow from the layer and the head."""
    names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    return frozenset(
        f"{MiniMax.prefix}layers.{layer}.self_attn.{name}"
        for layer in config.part(LinearAttention).layers
        for name in names
    )


LIGHTNING_PARTS = (LinearAttention, ResidualFactors, MixtureOfExperts)
LIGHTNING_DEFAULTS = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6}


class MiniMaxExperts(DeepseekExperts):
    correction_name = "e_score_correction_bias"


class MiniMaxM2(Llama):
    attention, experts = OlmoAttention, MiniMaxExperts
    mlp_name, mlp_parts = "block_sparse_moe", GATED_W


def read_minimax_m2(hf: Fields) -> dict[str, Any]:
    """Raises ModelError for settings that transformers does not implement either."""
    for name, value in (
        ("use_qk_norm", True),
        ("qk_norm_type", "per_layer"),
        ("scoring_func", "sigmoid"),
        ("use_routing_bias", True),
    ):
        if hf.get(name, value) != value:
            raise ModelError(f"{name}={hf[name]!r} is not supported; {value!r} is")
    if hf.get("shared_intermediate_size"):
        raise ModelError(f"shared_intermediate_size={hf['shared_intermediate_size']} is not supported; 0 is")
    if any(kind != 1 for kind in hf.get("attn_type_list") or []):
        raise ModelError("attn_type_list has another number than 1: lightning attention is not supported")
    share = float(hf["rotary_dim"]) / float(hf["head_dim"]) if hf.get("rotary_dim") else 1.0
    fields = partly_rotated(hf, share)
    experts = experts_everywhere(fields, hf["num_local_experts"], hf["num_experts_per_tok"])
    return {**fields, "parts": (experts, GroupRouting(scores="sigmoid"))}


M2_DEFAULTS = {
    "head_dim": 128, "max_position_embeddings": 196608, "num_local_experts": 256, "num_experts_per_tok": 8,
}  # fmt: skip
M2_PARTS = (MixtureOfExperts, GroupRouting)


FAMILIES = {
    "minimax": Family(
        "MiniMax-Text-01 (converted for transformers)",
        MiniMax,
        read_converted,
        LIGHTNING_DEFAULTS,
        unread=constants,
        parts=LIGHTNING_PARTS,
    ),
    "minimax_m1": Family("MiniMax-M1", MiniMax, read_published, LIGHTNING_DEFAULTS, parts=LIGHTNING_PARTS),
    "minimax_m2": Family(
        "MiniMax-M2, M2.1", MiniMaxM2, read_minimax_m2, M2_DEFAULTS, skipped=AHEAD, parts=M2_PARTS
    ),
    "minimax_text_01": Family(
        "MiniMax-Text-01", MiniMax, read_published, LIGHTNING_DEFAULTS, parts=LIGHTNING_PARTS
    ),
}
