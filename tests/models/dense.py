"""Reference implementations of attention and recurrences over whole sequences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.qkv import Qkv, QkvProduct, QueriesOnly
from pallas_kernels.elementwise.rotary import Rotation, rotate_by_xla
from pallas_kernels.quantization.quantized import dequantize, quantize


class DenseCausal:
    """Attention of many sequences on one token axis: a token sees its own sequence up to itself.

    Args:
        kind: keys and values are rounded to this eight-bit format, as in a cache; None: they are not rounded.
    """

    def __init__(self, sequence: jax.Array, positions: jax.Array, kind: str | None = None) -> None:
        self.positions, self.kind = positions, kind
        self.written: dict[int, tuple[jax.Array, jax.Array]] = {}
        self.distance = positions[:, None] - positions
        self.causal = (sequence[:, None] == sequence) & (self.distance >= 0)

    def __call__(
        self,
        layer: int,
        qkv: Qkv | QkvProduct | QueriesOnly,
        rotation: Rotation | None,
        options: AttentionOptions,
    ) -> jax.Array:
        window, soft_cap, sinks, slopes = options.window, options.soft_cap, options.sinks, options.slopes
        if isinstance(qkv, QueriesOnly):
            q = qkv.q
        else:
            q, k, v = qkv.split()
            k = k if rotation is None else rotate_by_xla(k, rotation)
            latent = v.shape[-1] < k.shape[-1]  # a value is a part of its key, with the same rounding
            k, v = (x if self.kind is None else dequantize(quantize(x, self.kind)) for x in (k, v))
            v = k[..., : v.shape[-1]] if latent else v
            self.written[layer] = k, v
        q = q if rotation is None else rotate_by_xla(q, rotation)
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in self.written[layer])
        scores = jnp.einsum("qhd,khd->hqk", q, k) * options.scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if slopes is not None:
            scores -= slopes[:, None, None] * self.distance
        visible = self.causal if window is None else self.causal & (self.distance < window)
        scores = jnp.where(visible, scores, -jnp.inf)
        if sinks is not None:
            scores = jnp.concatenate(
                [scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], axis=-1
            )
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores)[..., : k.shape[0]], v)

    def convolve(self, layer: int, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Sequences follow each other on the token axis, so the token `back` before another is `back` places
        before it.
        """
        x, weight, out = x.astype(jnp.float32), weight.astype(jnp.float32), jnp.zeros(x.shape, jnp.float32)
        for back in range(weight.shape[1]):
            earlier = jnp.pad(x, ((back, 0), (0, 0)))[: len(x)]
            out += jnp.where((self.positions >= back)[:, None], earlier, 0) * weight[:, -1 - back]
        return out

    def recur(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, rate: jax.Array | None
    ) -> jax.Array:
        """Token by token. Without a rate: linear attention."""
        q, k = (jnp.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))

        def one(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
            position, q, k, v, decay, rate = token
            state = jnp.where(position == 0, 0, state) * jnp.exp(decay)[:, None, None]
            added = v if rate is None else (v - jnp.einsum("hkv,hk->hv", state, k)) * rate[:, None]
            state = state + jnp.einsum("hk,hv->hkv", k, added)
            return state, jnp.einsum("hkv,hk->hv", state, q)

        state = jnp.zeros((v.shape[1], q.shape[2], v.shape[2]), jnp.float32)
        return lax.scan(one, state, (self.positions, q, k, v, decay, rate))[1]
