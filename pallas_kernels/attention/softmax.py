"""The softmax of all attention kernels: plain functions of scores and partial results, for any kind of
array.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.options import AttentionOptions

MASKED = -1e30  # finite, so that a row that has seen no token yet gives no NaN
SMALLEST = 1e-30  # minimum of a sum used as a divisor
FLOAT16_FACTOR = 2.0**8
LOG2_E = math.log2(math.e)


def scores(s: jax.Array, options: AttentionOptions) -> tuple[jax.Array, float]:
    """Capped products of queries and keys, and the factor that scales them times log2(e), since hardware
    computes powers of two.

    With a positive scale the factor is positive.
    """
    scale, soft_cap = options.scale, options.soft_cap
    if soft_cap is None:
        return s, scale * LOG2_E
    # tanh(x) = 1 - 2 / (1 + exp(2 x)), since the hardware's tanh has only eleven bits; and 1 / y as
    # rsqrt(y)^2, since a division needs so many registers that fewer blocks would fit.
    inverse_root = lax.rsqrt(1.0 + jnp.exp2(s * (2.0 * scale * LOG2_E / soft_cap)))
    return 1.0 - 2.0 * inverse_root * inverse_root, soft_cap * LOG2_E


def weight_factor(dtype: jax.typing.DTypeLike, *, scaled: bool) -> float:
    """What weights are multiplied by before they are rounded to dtype, and sums divided by in the end.

    Weights of eight-bit values are multiplied by the values' scales, too. In float16 most would be subnormal
    or zero. With the factor, values up to 32,000 give weights in range.

    Args:
        scaled: whether values have scales.
    """
    return FLOAT16_FACTOR if scaled and dtype == jnp.float16 else 1.0


def join(out: jax.Array, lse: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Joins results [splits, ..., head_dim] of parts of a softmax, given the base-2 logarithms [splits, ...]
    of their sums.

    sinks: scores without a value, times log2(e), with a shape that broadcasts to a split's.
    """
    if sinks is None and out.shape[0] == 1:
        return out[0]
    # one by one: XLA creates one or two GPU kernels for this, and up to four for reductions
    maximum = functools.reduce(jnp.maximum, [*lse] if sinks is None else [*lse, sinks])
    weights = [jnp.exp2(part - maximum) for part in lse]
    total = functools.reduce(jnp.add, weights if sinks is None else [*weights, jnp.exp2(sinks - maximum)])
    joined: jax.Array = functools.reduce(
        jnp.add, (part * weight[..., None] for part, weight in zip(out, weights, strict=True))
    )
    return joined / total[..., None]
