"""The cases and loads with which decode attention is timed: all row buckets, equal rows and ragged ones."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.quantized import Pages
from pallas_kernels.timing import block_tables, one_long, page_pool
from pallas_kernels.tuning import DecodeCase

SHAPES = [(32, 8, 128), (64, 8, 128)]  # heads, kv_heads, head_dim
KINDS = {None: None, "int8": "int8", "uint8": "float8_e4m3fn"}  # by stored dtype; None is the queries' dtype
ROWS = (8, 16, 32, 64, 128, 256)  # row buckets of an engine on a GPU
EVEN, LONGEST, SHORT = 8192, 32768, (256, 1024)  # tokens of a sequence
POOL = 1 << 30  # bytes of the KV cache, many times the size of a GPU's L2 cache


class CaseLoad(NamedTuple):
    tables: jax.Array  # int32 [CHAIN, rows, width]
    lengths: jax.Array  # int32 [rows]


def cases(
    heads: int, kv_heads: int, head_dim: int, page_size: int = 64, dtype: str = "bfloat16"
) -> list[DecodeCase]:
    """All cases that an engine may need with attention of this shape, for any max_model_len."""
    return [
        DecodeCase(cache or dtype, dtype, heads, kv_heads, head_dim, page_size, rows)
        for cache, rows in itertools.product(KINDS, ROWS)
    ]


@functools.lru_cache(maxsize=1)  # shared by all choices of a case
def arrays(case: DecodeCase) -> tuple[jax.Array, Pages, Pages, list[CaseLoad]]:
    """Queries, keys and values, and the loads: equal rows, and one long row among short ones."""
    kind = KINDS.get(case.cache)
    page = 2 * case.kv_heads * case.page_size * case.head_dim * jnp.dtype(case.cache).itemsize
    num_pages = max(2, POOL // page)
    k, v = page_pool((num_pages, case.kv_heads, case.page_size, case.head_dim), case.dtype, kind)
    q = jax.random.normal(jax.random.key(0), (case.rows, case.heads, case.head_dim), case.dtype)

    def load(lengths: list[int]) -> CaseLoad:
        pages = [-(-length // case.page_size) for length in lengths]
        tables = block_tables(num_pages, pages, width=-(-LONGEST // case.page_size))
        return CaseLoad(jnp.asarray(tables), jnp.asarray(lengths, jnp.int32))

    return q, k, v, [load(case.rows * [EVEN]), load(one_long(case.rows, LONGEST, *SHORT))]
