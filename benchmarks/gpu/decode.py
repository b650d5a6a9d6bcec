"""Decode attention: bytes a second, over what the device itself copies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.inputs import KINDS, free_bytes, large, page_bytes, tables
from benchmarks.gpu.rows import Row, attempt, skipped
from benchmarks.gpu.timing import CHAIN, ceilings, chained
from benchmarks.gpu.work import LLAMA, SMALL, Shape, decode_bytes
from pallas_kernels import dispatch
from pallas_kernels.quantized import Pages, Quantized

GOAL = 0.85
FILLS = 1 << 27  # bytes that a call must move to be held to the goal: some 30 us of an H200
BATCHES, CONTEXTS = (1, 16, 64, 256), (1024, 8192, 32768)


def measure(small: bool) -> Iterator[Row]:
    """Rows of every batch, context and cache; those with little to move have no goal."""
    bandwidth = ceilings(small).bandwidth
    yield Row("copy on this device", {"GB/s": bandwidth / 1e9})
    shape, cases = (SMALL, [(2, 64)]) if small else (LLAMA, [(batch, context) for context in CONTEXTS for batch in BATCHES])
    for kind in KINDS:
        yield from _of_kind(shape, kind, cases, bandwidth, small)


def _of_kind(shape: Shape, kind: str | None, cases: list[tuple[int, int]], bandwidth: float, small: bool) -> Iterator[Row]:
    name = "bfloat16" if kind is None else kind
    needed = max(batch * context for batch, context in cases) // shape.page_size + 1
    room = free_bytes()
    num_pages = needed if room is None else min(needed, int(0.8 * room) // page_bytes(shape, kind))
    k, v = large(shape, num_pages, "bfloat16", kind)
    q = jax.ShapeDtypeStruct((1, shape.heads, shape.head_dim), jnp.bfloat16)
    refused = None if small else _refused(q, k, v)
    if refused is not None:
        yield skipped(f"{name} cache", refused)
        return
    for batch, context in cases:
        case = f"{name} cache, batch {batch}, context {context}"
        if batch * context // shape.page_size >= k.shape[0]:
            yield skipped(case, f"needs {batch * context // shape.page_size} pages, there is memory for {num_pages}")
            continue
        yield attempt(case, partial(_row, case, shape, k, v, batch, context, bandwidth, small))


def _refused(q: Any, k: Pages, v: Pages) -> str | None:
    """Why the GPU's kernel cannot take these, or None."""
    device = jax.devices()[0]
    return f"device={device.device_kind}: it is no GPU" if device.platform == "cpu" else dispatch.why_decode_unsupported(q, k, v)


def _row(case: str, shape: Shape, k: Pages, v: Pages, batch: int, context: int, bandwidth: float, small: bool) -> Row:
    seconds = seconds_of(shape, k, v, batch, context, "xla" if small else "mosaic")
    eight_bits = isinstance(k, Quantized)
    moved = decode_bytes(shape, batch, context, 1 if eight_bits else 2, 4 if eight_bits else 0)
    rate = moved / seconds
    goal = GOAL if moved >= FILLS and not eight_bits and not small else None
    return Row(case, {"us": 1e6 * seconds, "GB/s": rate / 1e9, "share": rate / bandwidth}, goal)


def seconds_of(shape: Shape, k: Pages, v: Pages, batch: int, context: int, impl: dispatch.Impl) -> float:
    """Of a call, with sequences that all have `context` tokens, on other pages each time."""
    q = jax.random.normal(jax.random.key(1), (batch, shape.heads, shape.head_dim), jnp.bfloat16)
    block_tables = jnp.asarray(tables(k.shape[0], CHAIN, batch, context // shape.page_size))
    lengths = jnp.full((batch,), context, jnp.int32)
    attend = partial(dispatch.paged_attention_decode, scale=1 / math.sqrt(shape.head_dim), impl=impl)
    return chained(lambda q, table, k, v, lengths: attend(q, k, v, table, lengths), q, block_tables, k, v, lengths)
