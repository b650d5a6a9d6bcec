"""Random paged caches: small ones with NaN in unused parts, for correctness, and large ones on the device,
for timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.timing import page_pool
from benchmarks.gpu.work import Shape
from pallas_kernels.quantization.quantized import Pages, movable, quantize

KINDS = (None, "int8", "float8_e4m3fn")  # formats of a cache's numbers; None is the queries' dtype


class Paged(NamedTuple):
    k: Pages
    v: Pages
    tables: jax.Array  # int32 [rows, width]


def checked(lengths: Sequence[int], shape: Shape, dtype: str, kind: str | None, seed: int) -> Paged:
    """Sequences of these lengths on pages in random order. The last two share their first page.

    Numbers outside of sequences are NaN; in an int8 cache their scales are. Unused table entries are out of
    bounds, or the null page in the row of an empty sequence.
    """
    rng = np.random.default_rng(seed)
    width = max(1, -(-max(lengths) // shape.page_size))
    num_pages = 1 + len(lengths) * width
    tables = 1 + rng.permutation(num_pages - 1).reshape(len(lengths), width)
    tables[-1, 0] = tables[-2, 0]
    starts = np.arange(width) * shape.page_size
    here = starts < np.array(lengths)[:, None]
    # [rows, width, page_size]
    covered = np.arange(shape.page_size) < (np.array(lengths)[:, None, None] - starts[:, None])
    used = np.zeros((num_pages, shape.page_size), bool)
    np.logical_or.at(used, tables[here], covered[here])
    numbers = rng.normal(size=(2, num_pages, shape.kv_heads, shape.page_size, shape.head_dim)).astype(
        np.float32
    )
    k, v = (_stored(jnp.asarray(np.where(used[:, None, :, None], x, np.nan), dtype), kind) for x in numbers)
    return Paged(
        k,
        v,
        jnp.asarray(np.where(here, tables, np.where(here.any(1, keepdims=True), num_pages, 0)), jnp.int32),
    )


def _stored(pages: jax.Array, kind: str | None) -> Pages:
    return pages if kind is None else movable(quantize(pages, kind))


def large(shape: Shape, num_pages: int, dtype: str, kind: str | None) -> tuple[Pages, Pages]:
    """Random keys and values, created on the device."""
    return page_pool((num_pages, shape.kv_heads, shape.page_size, shape.head_dim), dtype, kind)


def page_bytes(shape: Shape, kind: str | None) -> int:
    """Bytes per page of keys and values together."""
    return 2 * shape.kv_heads * shape.page_size * (2 * shape.head_dim if kind is None else shape.head_dim + 4)


def free_bytes() -> int | None:
    """Device memory that JAX can still allocate; None on a CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
