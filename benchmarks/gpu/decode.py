"""Decode attention: bytes per second, relative to the device's copy bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.gpu.ceilings import ceilings
from benchmarks.gpu.inputs import KINDS, free_bytes, large, page_bytes
from benchmarks.gpu.rows import Row, attempt, skipped
from benchmarks.gpu.timing import block_tables, chained, one_long
from benchmarks.gpu.work import LLAMA, SMALL, Shape, decode_bytes
from pallas_kernels.attention import dispatch
from pallas_kernels.attention.options import PLAIN, AttentionOptions
from pallas_kernels.quantization.quantized import Pages, Quantized
from pallas_kernels.targets import Impl, why_none

GOAL = 0.85
FILLS = 1 << 27  # calls that move fewer bytes have no goal; an H200 takes about 30 us for these
CONTEXTS, BATCHES, RAGGED = (1024, 8192, 32768), (1, 16, 64, 256), (8, 64, 256)


class Batch(NamedTuple):
    """The rows of a case. lengths: tokens of each row; 0 is padding."""

    name: str
    lengths: list[int]


def batches(small: bool) -> list[Batch]:
    """Batches of equal rows, and batches for which splitting each sequence into equally many parts is slow.

    The latter are one live row in the engine's smallest bucket, and one long row among short ones.
    """
    if small:
        return [
            Batch("batch 2, context 64", [64, 64]),
            Batch("one row of 128 in a bucket of 8", [128] + 7 * [0]),
            _ragged(4, 128, 16, 48),
        ]
    alike = [
        Batch(f"batch {rows}, context {context}", rows * [context])
        for context in CONTEXTS
        for rows in BATCHES
    ]
    longest = CONTEXTS[-1]
    alone = Batch(f"one row of {longest} in a bucket of 8", [longest] + 7 * [0])
    return [*alike, alone, *(_ragged(rows, longest, 256, 1024) for rows in RAGGED)]


def _ragged(rows: int, longest: int, low: int, high: int) -> Batch:
    return Batch(
        f"batch {rows}, one row of {longest}, others of {low} to {high}", one_long(rows, longest, low, high)
    )


def measure(small: bool) -> Iterator[Row]:
    """Yields a row for each batch and cache format.

    GB/s count only the tokens of live rows. Cases that move few bytes have no goal.
    """
    bandwidth = ceilings(small).bandwidth
    yield Row("copy on this device", {"GB/s": bandwidth / 1e9})
    for kind in KINDS:
        yield from _of_kind(SMALL if small else LLAMA, kind, batches(small), bandwidth, small)


def _of_kind(
    shape: Shape, kind: str | None, cases: list[Batch], bandwidth: float, small: bool
) -> Iterator[Row]:
    name = "bfloat16" if kind is None else kind
    needed = 1 + max(sum(_pages(shape, batch)) for batch in cases)
    room = free_bytes()
    num_pages = needed if room is None else min(needed, int(0.8 * room) // page_bytes(shape, kind))
    k, v = large(shape, num_pages, "bfloat16", kind)
    q = jax.ShapeDtypeStruct((1, shape.heads, shape.head_dim), jnp.bfloat16)
    refused = None if small else _refused(q, k, v)
    if refused is not None:
        yield skipped(f"{name} cache", refused)
        return
    for batch in cases:
        case, pages = f"{name} cache, {batch.name}", sum(_pages(shape, batch))
        if pages >= k.shape[0]:
            yield skipped(case, f"needs {pages} pages, there is memory for {num_pages}")
            continue
        yield attempt(case, partial(_row, case, shape, k, v, batch, bandwidth, "xla" if small else "mosaic"))


def _pages(shape: Shape, batch: Batch) -> list[int]:
    return [-(-length // shape.page_size) for length in batch.lengths]


def _refused(q: Any, k: Pages, v: Pages) -> str | None:
    """Why the GPU's kernel does not support these arrays, or None."""
    device = jax.devices()[0]
    return (
        f"device={device.device_kind}: it is no GPU"
        if device.platform == "cpu"
        else why_none(dispatch.DECODE, None, q, k, v, PLAIN)
    )


def _row(case: str, shape: Shape, k: Pages, v: Pages, batch: Batch, bandwidth: float, impl: Impl) -> Row:
    seconds = seconds_of(shape, k, v, batch, impl)
    eight_bits = isinstance(k, Quantized)
    moved = decode_bytes(shape, batch.lengths, 1 if eight_bits else 2, 4 if eight_bits else 0)
    rate = moved / seconds
    goal = GOAL if moved >= FILLS and not eight_bits and impl == "mosaic" else None
    return Row(case, {"us": 1e6 * seconds, "GB/s": rate / 1e9, "share": rate / bandwidth}, goal)


def seconds_of(shape: Shape, k: Pages, v: Pages, batch: Batch, impl: Impl) -> float:
    """Seconds per call. Each call reads other pages."""
    q = jax.random.normal(jax.random.key(1), (len(batch.lengths), shape.heads, shape.head_dim), jnp.bfloat16)
    tables = jnp.asarray(block_tables(k.shape[0], _pages(shape, batch)))
    attend = partial(
        dispatch.paged_attention_decode, options=AttentionOptions(1 / math.sqrt(shape.head_dim)), impl=impl
    )
    lengths = jnp.asarray(batch.lengths, jnp.int32)
    return chained(lambda q, table, k, v, lengths: attend(q, k, v, table, lengths), q, tables, k, v, lengths)
