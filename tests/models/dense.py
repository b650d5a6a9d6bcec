"""Attention at its plainest, over whole sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jengine.models.layers import Attend
from pallas_kernels.xla import Rotation, rotate


def dense_causal(sequence: jax.Array, positions: jax.Array) -> Attend:
    """Attention of many sequences on one token axis: a token sees its own sequence up to itself."""
    distance = positions[:, None] - positions
    causal = (sequence[:, None] == sequence) & (distance >= 0)

    def attend(
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        *,
        rotation: Rotation | None,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, k if v is None else v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        visible = causal if window is None else causal & (distance < window)
        scores = jnp.where(visible, scores, -jnp.inf)
        if sinks is not None:
            scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], axis=-1)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores)[..., : k.shape[0]], v)

    return attend
