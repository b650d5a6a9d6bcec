"""What every attention kernel does to scores, and to partial results: plain functions of values, on whatever holds these."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30  # finite, so that a row that has seen nothing yet gives no NaN
SMALLEST = 1e-30  # of a sum that is divided by
LOG2_E = math.log2(math.e)


def scores(s: jax.Array, scale: float, soft_cap: float | None) -> tuple[jax.Array, float]:
    """Products of queries and keys, capped, and the factor that scales them times log2(e): powers of two are what the hardware takes.

    With a positive scale the factor is positive.
    """
    if soft_cap is None:
        return s, scale * LOG2_E
    # tanh(x) = 1 - 2 / (1 + exp(2 x)), since the hardware's own tanh has eleven bits; and 1 / y as rsqrt(y)^2, since the registers
    # that division takes would leave room for fewer blocks.
    inverse_root = lax.rsqrt(1.0 + jnp.exp2(s * (2.0 * scale * LOG2_E / soft_cap)))
    return 1.0 - 2.0 * inverse_root * inverse_root, soft_cap * LOG2_E


def join(out: jax.Array, lse: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Results [splits, ..., head_dim] of parts of a softmax, and the base-2 logarithms [splits, ...] of their sums, to the whole's.

    sinks: scores without a value, times log2(e), of a shape that broadcasts to a split's.
    """
    if sinks is None and out.shape[0] == 1:
        return out[0]
    # part by part: XLA makes a GPU kernel or two of this, and up to four of reductions
    most = functools.reduce(jnp.maximum, [*lse] if sinks is None else [*lse, sinks])
    weights = [jnp.exp2(part - most) for part in lse]
    total = functools.reduce(jnp.add, weights if sinks is None else [*weights, jnp.exp2(sinks - most)])
    joined: jax.Array = functools.reduce(jnp.add, (part * weight[..., None] for part, weight in zip(out, weights, strict=True)))
    return joined / total[..., None]
