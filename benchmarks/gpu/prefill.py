"""Prefill attention: operations per second, relative to the device's matrix products, and compared with other
implementations.

The others read contiguous keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.ceilings import ceilings
from benchmarks.gpu.inputs import KINDS, large
from benchmarks.gpu.prefill_peers import PEERS
from benchmarks.gpu.rows import SKIPPED, Row, attempt, skipped
from benchmarks.gpu.timing import CHAIN, block_tables, chained
from benchmarks.gpu.work import LLAMA, SMALL, Shape, prefill_operations
from pallas_kernels.attention import dispatch
from pallas_kernels.attention.options import PLAIN, AttentionOptions
from pallas_kernels.targets import why_none

GOAL = 0.65
CHUNKS = 512, 1024, 2048, 4096, 8192  # tokens per prompt, all in one call
FULL = 16384  # tokens of a call with many prompts
TILE = 64


def measure(small: bool) -> Iterator[Row]:
    """Yields rows for calls with one prompt, and with prompts of FULL tokens in total; then rows of the other
    implementations.
    """
    rate = ceilings(small).rate
    yield Row("matrix product on this device", {"TFLOP/s": rate / 1e12})
    shape, cases = LLAMA, [(sequences, chunk) for chunk in CHUNKS for sequences in (1, FULL // chunk)]
    if small:
        shape, cases = SMALL, [(2, 128)]

    def row(
        case: str, sequences: int, chunk: int, run: Callable[[], float], goal: float | None = None
    ) -> Row:
        seconds = run()
        done = prefill_operations(shape, sequences, chunk) / seconds
        return Row(
            case, {"us": 1e6 * seconds, "TFLOP/s": done / 1e12, "share": done / rate}, None if small else goal
        )

    for kind in KINDS:
        for sequences, chunk in cases if kind is None else cases[-1:]:
            case = f"{kind or 'bfloat16'} cache, {sequences} x {chunk}"
            refused, run = prepared(shape, kind, sequences, chunk, small)
            goal = GOAL if kind is None else None
            yield (
                skipped(case, refused)
                if refused
                else attempt(case, partial(row, case, sequences, chunk, run, goal))
            )
    for name, peer in PEERS.items():
        for sequences, chunk in cases:
            case = f"{name}, {sequences} x {chunk}"
            found = attempt(
                name, partial(row, case, sequences, chunk, partial(peer, shape, sequences, chunk)), skipped
            )
            yield found
            if found.outcome == SKIPPED:
                break


def prepared(
    shape: Shape, kind: str | None, sequences: int, chunk: int, small: bool
) -> tuple[str | None, Callable[[], float]]:
    """Why the kernel does not support this call, or None, and a function that returns the call's seconds."""
    per_prompt = chunk // TILE
    q = jax.random.normal(
        jax.random.key(1), (sequences * per_prompt, TILE, shape.heads, shape.head_dim), jnp.bfloat16
    )
    width = -(-chunk // shape.page_size)
    num_pages = 1 + CHAIN * sequences * width
    k, v = large(shape, num_pages, "bfloat16", kind)
    refused = None if small else why_none(dispatch.PREFILL, None, q, k, v, PLAIN)
    each = jnp.repeat(jnp.asarray(block_tables(num_pages, [width] * sequences)), per_prompt, axis=1)
    positions = jnp.tile(jnp.arange(per_prompt, dtype=jnp.int32) * TILE, sequences)
    lengths = jnp.full_like(positions, TILE)
    attend = partial(
        dispatch.paged_attention_prefill,
        options=AttentionOptions(1 / math.sqrt(shape.head_dim)),
        impl="xla" if small else "mosaic",
    )

    def call(q: jax.Array, table: jax.Array, *args: Any) -> jax.Array:
        k, v, positions, lengths = args
        return attend(q, k, v, table, positions, lengths)

    return refused, partial(chained, call, q, each, k, v, positions, lengths)
