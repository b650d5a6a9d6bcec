"""Truncates distributions by top_k, top_p and min_p.

No row is sorted. The k-th largest logit, and the logit at which the most likely tokens' mass reaches top_p,
are found by a search over the 32 bits of a float. All ties at a threshold are kept.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jengine.execution.sampling_row import Sampling
from pallas_kernels.devices import traced_for_cpu

DIGIT = 4  # bits of a key per pass
BLOCK = 128  # vocabulary entries in a block


# Branches skip work that no row needs. On a GPU a branch would make XLA wait for the host, so there the work
# is always done.


def either[T](needed: jax.Array, work: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """work() if any of `needed`, bool [rows], is set, otherwise otherwise().

    On a GPU always work(), which must give the same result if none is set.
    """
    return lax.cond(needed.any(), work, otherwise) if traced_for_cpu() else work()


def if_any(needed: jax.Array, change: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """change(x) if any of `needed` is set, otherwise a copy of x. On a GPU always change(x)."""
    return either(needed, lambda: change(x), lambda: x)


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
    return (by_bits if traced_for_cpu() else by_digits)(x, weight, wanted)


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
        weights = tuple(jnp.where(x >= values[:, i, None], weight, 0.0) for i in range(len(digits)))
        sums = jnp.stack(lax.reduce(weights, (np.float32(0),) * len(weights), _add, (1,)))  # reads x once
        key = key << DIGIT | (sums >= wanted).sum(0, dtype=jnp.uint32)[:, None]
    return _float_of(key[:, 0])


def _float_of(key: jax.Array) -> jax.Array:
    """The float32 with this rank, uint32, in the order of floats; -inf for ranks below them."""
    key = jnp.maximum(key, np.uint32(0x007FFFFF))
    bits = jnp.where(key >> 31 == 1, key ^ jnp.uint32(1 << 31), ~key)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _add(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def argmax(x: jax.Array) -> jax.Array:
    """jnp.argmax along the last axis of x [rows, size], int32 [rows]: the first of equals. With NaN, any
    token.

    Works in two levels, since on a CPU XLA computes a maximum with SIMD, but an argmax element by element.
    """
    blocks = _blocks(x)
    block = jnp.argmax(blocks.max(-1), -1)
    return (block * BLOCK + jnp.argmax(blocks[jnp.arange(len(x)), block], -1)).astype(jnp.int32)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """lax.top_k along the last axis of x [rows, size]: values and indices int32, both [rows, k], the first of
    equals first.

    The results are all in the k blocks with the largest maxima (the first of equals), since these maxima come
    before any value of another block. With NaN, any indices.
    """
    blocks = _blocks(x)
    if blocks.shape[1] <= k:
        values, ids = lax.top_k(x, k)
        return values, ids.astype(jnp.int32)
    # in index order, so that the first of equals stays first
    chosen = jnp.sort(lax.top_k(blocks.max(-1), k)[1])
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], 1).reshape(len(x), -1)
    values, places = lax.top_k(candidates, k)
    ids = jnp.take_along_axis(chosen, places // BLOCK, 1) * BLOCK + places % BLOCK
    # the last block's padding is above a negative NaN
    return values, jnp.minimum(ids, x.shape[-1] - 1).astype(jnp.int32)


def _blocks(x: jax.Array) -> jax.Array:
    """[rows, blocks, BLOCK]. The last block is padded with -inf."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[-1] % BLOCK)), constant_values=-jnp.inf).reshape(
        len(x), -1, BLOCK
    )
