"""Qwen3-Next, Qwen3.5 and 3.6: gated delta nets in most layers, gated attention in the others, experts with a
shared one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.base.errors import ModelError
from jengine.models.cache import CacheEntry
from jengine.models.config import ModelConfig
from jengine.models.family import OF_WHOLE, Family, Fields, TextPart
from jengine.models.hf_config import attention_biases, check_mixed, interleaved, partly_rotated
from jengine.models.layers import Attend, Mixer, Recur, dense, matrix, param, row_parallel_dense
from jengine.models.llama import Llama
from jengine.models.moe import MixtureOfExperts, SharedExperts, experts_everywhere, qwen_experts
from jengine.models.pieces import EVERY, Part, Piece, heads, qkv_parts
from jengine.models.qwen import Qwen3Attention
from jengine.models.recurrent import LinearAttention, state_entry
from pallas_kernels.elementwise.rotary import Rotation

EPSILON = 1e-6  # for the norms of queries and keys


class GatedAttention(Qwen3Attention):
    """Attention whose output is multiplied by a gate. The product of queries, keys and values also computes
    the gate.
    """

    def layout(self, config: ModelConfig) -> tuple[int, tuple[Part, ...]]:
        """A kv head's rows: its queries, then key, value, and the gates of its queries. In a checkpoint a
        gate follows its query.
        """
        dim = config.head_dim
        q, k, v = qkv_parts(config)
        gates = dim * (config.group_size_padded + 2)
        places: list[tuple[slice, tuple[int | slice, ...]]] = []
        for head, laid, row in heads(q, dim):
            for half, at in enumerate((row, gates + row)):
                start = (2 * head + half) * dim
                places.append((slice(start, start + dim), (laid, slice(at, at + dim))))
        return gates + dim * config.group_size_padded, (Part(2 * q.rows, tuple(places)), k, v)

    def finish(self, y: jax.Array, gates: jax.Array) -> jax.Array:
        return y * jax.nn.sigmoid(gates.reshape(y.shape))


class GatedDeltaNet(nnx.Module):
    """A short convolution, the gated delta rule, and a gated norm. Parameters are grouped by key heads, as in
    the checkpoint.
    """

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        self.config, self.linear, self.eps = config, config.part(LinearAttention), config.norm_eps
        linear, hidden = self.linear, config.hidden_size
        real = slice(0, linear.key_heads)
        laid = config.padded(linear.key_heads)
        values = linear.group * linear.value_dim
        mixed, by_head = self.mixed_source(linear, name, hidden), ("heads", None, None)
        self.mixed = matrix((laid, linear.channels + values, hidden), dtype, by_head, *mixed)
        self.gates = matrix(
            (laid, 2 * linear.group, hidden),
            dtype,
            by_head,
            *self.gates_source(linear, name, hidden),
            exact=True,
            adaptable=True,
        )
        convolved = by_kind(linear, f"{name}.conv1d.weight", 1, linear.taps)
        self.convolution = param(
            (laid, linear.channels, linear.taps), dtype, by_head, *convolved, multiplies=True
        )
        per_head = (laid, linear.group), jnp.float32, ("heads", None)
        self.decay = param(*per_head, Piece(f"{name}.A_log", (linear.value_heads,), (real,)))
        self.bias = param(*per_head, Piece(f"{name}.dt_bias", (linear.value_heads,), (real,)))
        self.norm = param(
            (linear.value_dim,), dtype, (None,), Piece(f"{name}.norm.weight", (linear.value_dim,))
        )
        read = linear.key_heads * values
        out = Piece(f"{name}.out_proj.weight", (hidden, read), (EVERY, slice(0, read)))
        self.out = matrix((hidden, laid * values), dtype, (None, "heads"), out)

    def mixed_source(self, linear: LinearAttention, name: str, hidden: int) -> tuple[Piece, ...]:
        """The checkpoint tensors of queries, keys, values and output gates. Here, one tensor stores each key
        head's rows together.
        """
        rows = linear.key_heads * (linear.channels + linear.group * linear.value_dim)
        return (Piece(f"{name}.in_proj_qkvz.weight", (rows, hidden), (slice(0, linear.key_heads),)),)

    def gates_source(self, linear: LinearAttention, name: str, hidden: int) -> tuple[Piece, ...]:
        """The checkpoint tensors of rates and decays."""
        return (
            Piece(
                f"{name}.in_proj_ba.weight", (2 * linear.value_heads, hidden), (slice(0, linear.key_heads),)
            ),
        )

    def __call__(self, layer: int, x: jax.Array, rotation: Rotation | None, attend: Attend) -> jax.Array:
        """x [N, hidden] -> [N, hidden]. The rotation is not used: only the recurrence depends on the order of
        tokens.
        """
        states = cast(Recur, attend)
        linear, (laid, channels, taps) = self.linear, self.convolution[...].shape
        mixed = dense(x, self.mixed[...])
        convolved = states.convolve(
            layer,
            mixed[:, :, :channels].reshape(-1, laid * channels),
            self.convolution[...].reshape(-1, taps),
        )
        convolved = jax.nn.silu(convolved).reshape(-1, laid, channels)
        q, k, v = jnp.split(convolved, [linear.key_dim, 2 * linear.key_dim], axis=-1)
        v = v.reshape(-1, laid * linear.group, linear.value_dim)
        # [N, key heads, group]
        rate, decay = jnp.split(dense(x, self.gates[...], dtype=jnp.float32), 2, axis=-1)
        rate = jax.nn.sigmoid(rate)
        decay = -jnp.exp(self.decay[...]) * jax.nn.softplus(decay + self.bias[...])
        q, k = _unit(q) * linear.key_dim**-0.5, _unit(k)
        read = states.recur(layer, q, k, v, decay.reshape(-1, v.shape[1]), rate.reshape(-1, v.shape[1]))
        read *= lax.rsqrt(jnp.mean(read * read, axis=-1, keepdims=True) + self.eps) * self.norm[...].astype(
            jnp.float32
        )
        read *= jax.nn.silu(mixed[:, :, channels:].astype(jnp.float32)).reshape(read.shape)
        return row_parallel_dense(read.reshape(x.shape[0], -1).astype(x.dtype), self.out[...])

    def cache(self, layer: int) -> CacheEntry:
        """A token's key, its update and its query each use every element of the state."""
        return state_entry(self.config, self.linear, uses=6)


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON)


def by_kind(linear: LinearAttention, name: str, *inputs: int) -> tuple[Piece, ...]:
    """The pieces of one tensor that holds all queries, then all keys, then all values, for a parameter [key
    heads, channels, ...].
    """
    real, key, pieces, row, channel = slice(0, linear.key_heads), linear.key_dim, list[Piece](), 0, 0
    for size in (key, key, linear.group * linear.value_dim):
        rows = slice(row, row := row + linear.key_heads * size)
        part = real, slice(channel, channel := channel + size)
        pieces.append(Piece(name, (linear.key_heads * linear.channels, *inputs), part, rows))
    return tuple(pieces)


class SeparateDeltaNet(GatedDeltaNet):
    """Qwen3.5's delta net: checkpoints store more, separate tensors."""

    def mixed_source(self, linear: LinearAttention, name: str, hidden: int) -> tuple[Piece, ...]:
        values = linear.group * linear.value_dim
        place = slice(0, linear.key_heads), slice(linear.channels, linear.channels + values)
        z = Piece(f"{name}.in_proj_z.weight", (linear.key_heads * values, hidden), place)
        return *by_kind(linear, f"{name}.in_proj_qkv.weight", hidden), z

    def gates_source(self, linear: LinearAttention, name: str, hidden: int) -> tuple[Piece, ...]:
        real, group = slice(0, linear.key_heads), linear.group
        places = {"b": slice(0, group), "a": slice(group, 2 * group)}
        return tuple(
            Piece(f"{name}.in_proj_{p}.weight", (linear.value_heads, hidden), (real, place))
            for p, place in places.items()
        )


class Qwen3Next(Llama):
    attention, experts = GatedAttention, SharedExperts
    delta_net: type[GatedDeltaNet] = GatedDeltaNet

    def mixer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Mixer:
        if index in config.part(LinearAttention).layers:
            return self.delta_net(config, dtype, f"{name}.linear_attn")
        return super().mixer(config, dtype, name, index)


class Qwen35(Qwen3Next):
    delta_net = SeparateDeltaNet


def read_linear_attention(hf: Fields) -> LinearAttention:
    """The layers and sizes of the gated delta nets.

    Raises:
        ModelError: no layer attends, or a layer type or size is not supported.
    """
    layers, every = int(hf["num_hidden_layers"]), int(hf.get("full_attention_interval") or 4)
    usual = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    types: Sequence[str] = hf.get("layer_types") or usual
    check_mixed(types, layers, "full_attention", "linear_attention")
    linear = LinearAttention(
        layers=tuple(i for i, kind in enumerate(types) if kind == "linear_attention"),
        key_heads=int(hf.get("linear_num_key_heads", 16)),
        value_heads=int(hf.get("linear_num_value_heads", 32)),
        key_dim=int(hf.get("linear_key_head_dim", 128)),
        value_dim=int(hf.get("linear_value_head_dim", 128)),
        taps=int(hf.get("linear_conv_kernel_dim", 4)),
    )
    if linear.value_heads % linear.key_heads:
        limit = f"is not a multiple of linear_num_key_heads={linear.key_heads}"
        raise ModelError(f"linear_num_value_heads={linear.value_heads} {limit}")
    if linear.taps < 2:
        raise ModelError(f"linear_conv_kernel_dim={linear.taps} must be at least 2")
    return linear


def read_qwen3_next(hf: Fields) -> dict[str, Any]:
    experts = qwen_experts(hf, hf.get("num_experts", 512), 10, size=512, shared_size=512, normalize=True)
    parts = read_linear_attention(hf), experts
    return {**partly_rotated(hf, 0.25), **attention_biases(hf), "norm_offset": 1.0, "parts": parts}


def read_qwen3_5(hf: Fields) -> dict[str, Any]:
    if not hf.get("attn_output_gate", True):
        raise ModelError("attn_output_gate=false is not supported")
    return {
        **interleaved(partly_rotated(hf, 0.25), (11, 11, 10)),
        **attention_biases(hf),
        "norm_offset": 1.0,
        "parts": (read_linear_attention(hf),),
    }


def read_qwen3_5_moe(hf: Fields) -> dict[str, Any]:
    fields = read_qwen3_5(hf)
    count, per_token = hf.get("num_experts", 256), hf.get("num_experts_per_tok", 8)
    sizes = hf.get("moe_intermediate_size", 512), hf.get("shared_expert_intermediate_size", 512)
    experts = experts_everywhere(fields, count, per_token, *sizes)
    return {**fields, "parts": (*fields["parts"], experts)}


PARTS = (LinearAttention, MixtureOfExperts)
DEFAULTS = {"head_dim": 256, "max_position_embeddings": 32768}
MOE_DEFAULTS = {**DEFAULTS, "intermediate_size": 512}  # not used by any layer
AHEAD, IMAGES = ("mtp.",), ("visual.", "mtp.")  # multi-token prediction (MTP); and vision

DENSE, MOE = TextPart(("qwen3_5_text",), IMAGES), TextPart(("qwen3_5_moe_text",), IMAGES)
FAMILIES = {
    "qwen3_5": Family("Qwen3.5, Qwen3.6", Qwen35, read_qwen3_5, DEFAULTS, DENSE, parts=PARTS),
    "qwen3_5_moe": Family(
        "Qwen3.5 and 3.6 with experts", Qwen35, read_qwen3_5_moe, MOE_DEFAULTS, MOE, parts=PARTS
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3.5 and 3.6 with experts (text)",
        Qwen35,
        read_qwen3_5_moe,
        MOE_DEFAULTS,
        skipped=AHEAD,
        parts=PARTS,
        renamed=OF_WHOLE,
    ),
    "qwen3_5_text": Family(
        "Qwen3.5, Qwen3.6 (text)",
        Qwen35,
        read_qwen3_5,
        DEFAULTS,
        skipped=AHEAD,
        parts=PARTS,
        renamed=OF_WHOLE,
    ),
    "qwen3_next": Family("Qwen3-Next", Qwen3Next, read_qwen3_next, DEFAULTS, skipped=AHEAD, parts=PARTS),
}
