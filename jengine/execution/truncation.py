"""Truncates distributions by top_k, top_p and min_p.

No row is sorted. The k-th largest logit, and the logit at which the most likely tokens' mass reaches top_p,
are found by a search over the 32 bits of a float. All ties at a threshold are kept.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jengine.execution.branches import either
from jengine.execution.sampling_row import Sampling

DIGIT = 4  # bits of a key per pass


def truncating(sampling: Sampling) -> jax.Array:
    """Rows that `truncate` changes, bool [rows]. Greedy rows do not need it."""
    return (sampling.temperature > 0) & ((sampling.min_p > 0) | (sampling.top_k > 0) | (sampling.top_p < 1))


def truncate(scaled: jax.Array, sampling: Sampling) -> jax.Array:
    """Applies min_p, then top_k, then top_p to what is left. Dropped tokens become -inf.

    The largest value of each row must be 0. If all rows are greedy, tokens may be left as they are.
    """
    random, vocab = sampling.temperature > 0, scaled.shape[-1]
    k = jnp.where((sampling.top_k == 0) | (sampling.top_k > vocab), vocab, sampling.top_k)
    all_stay = jnp.full(scaled.shape[:1], -jnp.inf)

    def of_count() -> jax.Array:
        return _threshold(scaled, jnp.ones((), jnp.float32), k.astype(jnp.float32))

    def of_mass() -> jax.Array:
        mass = jnp.exp(scaled)
        # inf: never reached
        wanted = jnp.where(sampling.top_p >= 1.0, jnp.inf, sampling.top_p * mass.sum(-1))
        return _threshold(scaled, mass, wanted)

    scaled = jnp.where(scaled < jnp.log(sampling.min_p)[:, None], -jnp.inf, scaled)
    scaled = jnp.where(
        scaled < either(random & (k < vocab), of_count, lambda: all_stay)[:, None], -jnp.inf, scaled
    )
    return jnp.where(
        scaled < either(random & (sampling.top_p < 1), of_mass, lambda: all_stay)[:, None], -jnp.inf, scaled
    )


def _threshold(x: jax.Array, weight: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest t, [rows], for which the weights of {x >= t} sum to at least `wanted`; -inf if there is
    none.

    A search over the integers that order float32 numbers needs a fixed number of sums over the row, whatever
    its values.
    """
    t: jax.Array = lax.platform_dependent(x, weight, wanted, cpu=by_bits, default=by_digits)
    return t


def by_bits(x: jax.Array, weight: jax.Array, wanted: jax.Array) -> jax.Array:
    """`_threshold` in a loop of 32 passes. Fastest on a CPU, since it needs the fewest sums."""

    def bit(i: jax.Array, key: jax.Array) -> jax.Array:
        higher = key | (jnp.uint32(1) << (31 - i.astype(jnp.uint32)))
        enough = jnp.sum(jnp.where(x >= _float_of(higher)[:, None], weight, 0.0), -1) >= wanted
        return jnp.where(enough, higher, key)

    return _float_of(lax.fori_loop(0, 32, bit, jnp.zeros(x.shape[:1], jnp.uint32)))


def by_digits(x: jax.Array, weight: jax.Array, wanted: jax.Array) -> jax.Array:
    """`_threshold` in 8 unrolled passes of 15 sums. Faster on a GPU, where memory and launches dominate and
    loops wait for the host.

    All passes are the same computation, and barriers keep them apart, so XLA compiles its kernels once.
    """
    weight = jnp.broadcast_to(weight, x.shape)
    digits = jnp.arange(1, 1 << DIGIT, dtype=jnp.uint32)
    # a one, then the digits found so far; the last pass shifts the one out
    key = jnp.ones((len(x), len(digits)), jnp.uint32)
    for _ in range(32 // DIGIT):
        shift = lax.clz(key) + 1
        key, values = lax.optimization_barrier((key, _float_of(key << shift | digits << shift - DIGIT)))
        kept = tuple(jnp.where(x >= values[:, i, None], weight, 0.0) for i in range(len(digits)))
        sums = jnp.stack(lax.reduce(kept, (np.float32(0),) * len(kept), _add, (1,)))  # reads x once
        key = key << DIGIT | (sums >= wanted).sum(0, dtype=jnp.uint32)[:, None]
    return _float_of(key[:, 0])


def _float_of(key: jax.Array) -> jax.Array:
    """The float32 with this rank, uint32, in the order of floats; -inf for ranks below them."""
    key = jnp.maximum(key, np.uint32(0x007FFFFF))
    bits = jnp.where(key >> 31 == 1, key ^ jnp.uint32(1 << 31), ~key)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _add(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))
