"""Median seconds of a call on a device, with pages spread over more memory than its cache holds."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantization.quantized import Pages, movable, quantize

SAMPLE = 0.05  # minimum seconds of a sample
SAMPLES = 7
IN_FLIGHT = 16  # maximum concurrent calls: each holds memory for its result
CHAIN = 8  # calls in one program, each of which uses the result of the previous one
REPEATED = 512  # distinct pages of a pool; the others are copies of them


def median(
    call: Callable[[], Any], wait: Callable[[Any], object] = jax.block_until_ready, samples: int = SAMPLES
) -> float:
    """Median seconds of a call over several samples.

    A sample consists of many calls, dispatched while earlier ones run. A device executes in order, so the
    host only has to be faster than the device. Nothing is subtracted. The first calls, which compile, are not
    counted.

    Args:
        wait: waits for the result of a call.
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
    """Median seconds of function(x, one, *fixed), whose result is like x, in a program with CHAIN calls.

    Args:
        each: a tree of arrays with CHAIN entries, one for each call, so that each call reads different
            memory.
    """
    return seconds(chain(function), first, each, *fixed)


def chain(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The program of `chained`, for timing with several arguments of the same shapes."""
    call = jax.jit(function)  # lowered only once

    @jax.jit
    def run(x: jax.Array, each: Any, *fixed: Any) -> jax.Array:
        for i in range(CHAIN):
            x = call(x, jax.tree.map(lambda array, i=i: array[i], each), *fixed)
        return x

    return run


def seconds(program: Callable[..., jax.Array], *args: Any) -> float:
    """Seconds of one of the calls in a program returned by `chain`."""
    return median(partial(program, *args)) / CHAIN


def page_pool(shape: Sequence[int], dtype: str, kind: str | None) -> tuple[Pages, Pages]:
    """Random keys and values, generated on the device.

    Args:
        shape: at least num_pages, kv_heads, page_size, head_dim.
        kind: int8 or float8_e4m3fn; None stores dtype.
    """

    @partial(jax.jit, static_argnums=1)
    def make(key: jax.Array, repeats: int) -> Any:
        few = jax.random.normal(key, (REPEATED, *shape[1:]), "float32" if kind else dtype)
        stored = movable(quantize(few, kind)) if kind else few
        return jax.tree.map(lambda x: jnp.tile(x, (repeats, *[1] * (x.ndim - 1))), stored)

    k, v = (make(key, -(-shape[0] // REPEATED)) for key in jax.random.split(jax.random.key(0)))
    return k, v


def block_tables(num_pages: int, pages: Sequence[int], calls: int = CHAIN, width: int = 0) -> np.ndarray:
    """Block tables int32 [calls, rows, width] in random order. A page is repeated only after all have been
    used.

    Args:
        pages: number of pages in each row; the null page follows.
        width: at least the largest of `pages`, which is the default.
    """
    here = np.arange(width or max(pages)) < np.array(pages)[:, None]
    tables = np.zeros((calls, *here.shape), np.int32)
    order = 1 + np.random.default_rng(0).permutation(num_pages - 1)
    tables[:, here] = np.resize(order, (calls, int(here.sum())))
    return tables


def one_long(rows: int, longest: int, shortest: int, longest_of_others: int) -> list[int]:
    """Lengths of a ragged batch: one long row, and short ones with evenly spaced lengths."""
    return [longest, *np.linspace(shortest, longest_of_others, rows - 1, dtype=int).tolist()]
