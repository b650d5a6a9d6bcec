"""Medians of what a device does, and its two ceilings: how fast it copies, and how fast it multiplies matrices."""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

SAMPLE = 0.05  # seconds that a sample takes at least
SAMPLES = 7
IN_FLIGHT = 16  # calls at most: each holds memory for its result
CHAIN = 8  # calls in one program, each of which takes what the one before it gave


class Ceilings(NamedTuple):
    bandwidth: float  # bytes a second, read and written
    rate: float  # operations a second of a bfloat16 product with float32 sums; float32's on a CPU


def median(call: Callable[[], Any], wait: Callable[[Any], object] = jax.block_until_ready, samples: int = SAMPLES) -> float:
    """Seconds of a call, in the median of samples.

    A sample is many calls, dispatched while earlier ones run: a device does what it is given in order, so the host only has to be faster
    than the device. Nothing is subtracted. The first calls, which compile, are not counted.

    Args:
        wait: until what a call gave is there.
    """
    wait(call())
    calls, took = 1, _sample(call, wait, 1)
    while took < SAMPLE and calls < 1 << 20:
        calls = max(2 * calls, int(1.2 * calls * SAMPLE / max(took, 1e-6)))
        took = _sample(call, wait, calls)
    return statistics.median(_sample(call, wait, calls) for _ in range(samples)) / calls


def _sample(call: Callable[[], Any], wait: Callable[[Any], object], calls: int) -> float:
    pending: deque[Any] = deque()
    start = time.perf_counter()
    for _ in range(calls):
        if len(pending) == IN_FLIGHT:
            wait(pending.popleft())
        pending.append(call())
    wait(pending.pop())
    return time.perf_counter() - start


def chained(function: Callable[..., jax.Array], first: jax.Array, each: Any, *fixed: Any) -> float:
    """Seconds of function(x, one, *fixed), whose result is like x: CHAIN of them in one program, in the median.

    Args:
        each: a tree of arrays of CHAIN entries, one for each call, so that what is read lies elsewhere each time.
    """

    call = jax.jit(function)  # so that it is lowered once

    @jax.jit
    def run(x: jax.Array, each: Any, *fixed: Any) -> jax.Array:
        for i in range(CHAIN):
            x = call(x, jax.tree.map(lambda array, i=i: array[i], each), *fixed)
        return x

    return median(lambda: run(first, each, *fixed)) / CHAIN


@functools.cache
def ceilings(small: bool) -> Ceilings:
    """Of this device, measured once a process. small: for a CPU, to see that this runs."""
    words, size = (1 << 20, 256) if small else (1 << 28, 8192)
    x = jax.random.bits(jax.random.key(0), (words,))
    copies = jax.jit(jnp.copy), jax.jit(lambda x: x ^ 1)  # the runtime's own copy, and a kernel's
    copy = min(median(partial(copy, x)) for copy in copies)
    dtype = jnp.float32 if small else jnp.bfloat16
    a, b = (jax.random.normal(key, (size, size), dtype) for key in jax.random.split(jax.random.key(1)))
    b = b * size**-0.5  # so that products of products stay as large
    product = chained(lambda a, _, b: lax.dot(a, b, preferred_element_type=dtype), a, None, b)
    return Ceilings(2 * x.nbytes / copy, 2 * size**3 / product)
