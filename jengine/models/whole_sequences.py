"""Attention of whole sequences, without a cache: what a trainer or calibration gives a model as `attend`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.qkv import Qkv, QkvProduct, QueriesOnly
from pallas_kernels.elementwise.rotary import Rotation, rotate_by_xla


class WholeSequences:
    """`Attend` over whole sequences. The token axis holds `rows` sequences of equal length, in order.

    Scores and weights are float32, and all of them are kept, so memory grows with the square of the length.

    Args:
        until: int32 [tokens], for each query the index in its sequence of the last token that it sees, if not
            its own.
        visual: embeddings of images: `here`, bool [tokens], says which tokens stand for one, and `rows`,
            [tokens, hidden * levels], has them. None: there are none.
        sparing: keeps the scores of one sequence at a time.
    """

    def __init__(
        self, rows: int, until: jax.Array | None = None, visual: Any = None, *, sparing: bool = False
    ) -> None:
        self._rows, self._until, self.visual, self._sparing = rows, until, visual, sparing
        # the last keys and values by window: layers that read those of another layer have its window
        self._kept: dict[int | None, tuple[jax.Array, jax.Array]] = {}

    def __call__(
        self,
        layer: int,
        qkv: Qkv | QkvProduct | QueriesOnly,
        rotation: Rotation | None,
        options: AttentionOptions,
    ) -> jax.Array:
        if isinstance(qkv, QueriesOnly):
            q = qkv.q if rotation is None else rotate_by_xla(qkv.q, rotation)
        else:
            q, k, v = qkv.split()
            if rotation is not None:
                q, k = rotate_by_xla(q, rotation), rotate_by_xla(k, rotation)
            self._kept[options.window] = k, v
        k, v = (array.reshape(self._rows, -1, *array.shape[1:]) for array in self._kept[options.window])
        grouped = q.reshape(self._rows, k.shape[1], k.shape[2], -1, q.shape[-1])
        until = None if self._until is None or options.causal else self._until.reshape(self._rows, -1)
        attend = _one_by_one if self._sparing else _attention
        out: jax.Array = attend(grouped, k, v, options, until)
        return out.reshape(len(q), -1, v.shape[-1])


@jax.jit
def _one_by_one(
    q: jax.Array, k: jax.Array, v: jax.Array, options: AttentionOptions, until: jax.Array | None
) -> jax.Array:
    def single(sequence: Any) -> jax.Array:
        q, k, v, until = jax.tree.map(lambda array: array[None], sequence)
        return _attention(q, k, v, options, until)[0]

    out: jax.Array = lax.map(single, (q, k, v, until))
    return out


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, options: AttentionOptions, until: jax.Array | None
) -> jax.Array:
    """q [rows, length, kv_heads, group, dim]; k, v [rows, length, kv_heads, dim] -> as q, with v's dim."""
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = product("rqhgd,rkhd->rhgqk", q, k) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    heads = 1, *q.shape[2:4], 1, 1
    if options.slopes is not None:
        scores -= options.slopes.reshape(heads) * distance
    tokens = jnp.arange(q.shape[1])
    last = tokens[None] if until is None else until  # [rows or 1, length]
    seen = tokens <= last[:, None, None, :, None]
    if options.window is not None:
        seen &= distance < options.window
    scores = jnp.where(seen, scores, -jnp.inf)
    if options.sinks is not None:
        sinks = jnp.broadcast_to(options.sinks.reshape(heads), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    out: jax.Array = product("rhgqk,rkhd->rqhgd", weights, v)
    return out.astype(q.dtype)
