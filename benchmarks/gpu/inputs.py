"""Random paged caches: small ones whose unused parts are NaN, to compare with, and large ones on the device, to time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.work import Shape
from pallas_kernels.quantized import Pages, movable, quantize

KINDS = (None, "int8", "float8_e4m3fn")  # of a cache's numbers; None is the queries' dtype
REPEATED = 512  # pages of a large cache that differ; the rest are like them, elsewhere in memory


class Paged(NamedTuple):
    k: Pages
    v: Pages
    tables: jax.Array  # int32 [rows, width]


def checked(lengths: Sequence[int], shape: Shape, dtype: str, kind: str | None, seed: int) -> Paged:
    """Sequences of these lengths, on pages in random order, the last two with a first page in common.

    What no sequence covers is NaN (in an int8 cache, its scales are), and the table names no page for it; an empty one has the null page.
    """
    rng = np.random.default_rng(seed)
    width = max(1, -(-max(lengths) // shape.page_size))
    num_pages = 1 + len(lengths) * width
    tables = 1 + rng.permutation(num_pages - 1).reshape(len(lengths), width)
    tables[-1, 0] = tables[-2, 0]
    starts = np.arange(width) * shape.page_size
    here = starts < np.array(lengths)[:, None]
    covered = np.arange(shape.page_size) < (np.array(lengths)[:, None, None] - starts[:, None])  # [rows, width, page_size]
    used = np.zeros((num_pages, shape.page_size), bool)
    np.logical_or.at(used, tables[here], covered[here])
    numbers = rng.normal(size=(2, num_pages, shape.kv_heads, shape.page_size, shape.head_dim)).astype(np.float32)
    k, v = (_stored(jnp.asarray(np.where(used[:, None, :, None], x, np.nan), dtype), kind) for x in numbers)
    return Paged(k, v, jnp.asarray(np.where(here, tables, np.where(here.any(1, keepdims=True), num_pages, 0)), jnp.int32))


def _stored(pages: jax.Array, kind: str | None) -> Pages:
    return pages if kind is None else movable(quantize(pages, kind))


def large(shape: Shape, num_pages: int, dtype: str, kind: str | None) -> tuple[Pages, Pages]:
    """Keys and values, made on the device."""
    if kind is not None:
        dtype = "float32"  # as quantized ones are made from

    @partial(jax.jit, static_argnums=1)
    def make(key: jax.Array, repeats: int) -> Any:
        few = jax.random.normal(key, (REPEATED, shape.kv_heads, shape.page_size, shape.head_dim), dtype)
        return jax.tree.map(lambda x: jnp.tile(x, (repeats, *[1] * (x.ndim - 1))), _stored(few, kind))

    k, v = (make(key, -(-num_pages // REPEATED)) for key in jax.random.split(jax.random.key(0)))
    return k, v


def tables(num_pages: int, calls: int, rows: int, width: int) -> np.ndarray:
    """Block tables int32 [calls, rows, width] in random order; a page comes again when all have come."""
    order = 1 + np.random.default_rng(0).permutation(num_pages - 1)
    return np.resize(order, (calls, rows, width)).astype(np.int32)


def page_bytes(shape: Shape, kind: str | None) -> int:
    """Of keys and values together."""
    return 2 * shape.kv_heads * shape.page_size * (2 * shape.head_dim if kind is None else shape.head_dim + 4)


def free_bytes() -> int | None:
    """That JAX may still take of the device; None on a CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
