"""Norm and rotation of queries and keys, and the write to the KV cache, as one Pallas Mosaic GPU kernel for
Ampere and newer GPUs without kernels of their own.

A thread block, one warpgroup, processes one row (a query, the key or the value) of one kv head of a few
tokens, in registers: it reads and writes global memory without a copy in shared memory. Rows of tokens are
anywhere in the cache, so each thread computes its addresses. Padding is not written to pages, so no two
blocks write to the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache.qkv import Qkv, QkvProduct
from pallas_kernels.cache.rows import (
    TOKENS,
    joined,
    layout_of,
    normalized,
    parts_of,
    queries_of,
    query_types,
    rotated,
    scaled,
    spread,
)
from pallas_kernels.cache.xla import Queries
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.mosaic.ampere import gathered, scattered
from pallas_kernels.quantization.quantized import Pages, Quantized

SUBNORMAL = 2.0**-6  # float8_e4m3fn has multiples of 2^-9 below this


class Inputs(NamedTuple):
    """In global memory.

    Attributes:
        pages: of keys and of values, written in place.
        product: a `QkvProduct`.
        page_ids, offsets: int32 [tokens].
        rotation: float32 [tokens, pairs], cosines and sines; None: no rotation.
    """

    pages: Any
    product: Any
    page_ids: Any
    offsets: Any
    rotation: Any


def kv_write(
    k_pages: Pages,
    v_pages: Pages,
    qkv: Qkv | QkvProduct,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    rows: int,
    rotation: Rotation | None = None,
) -> tuple[Queries, tuple[Pages, Pages]]:
    """`hopper_write.kv_write` on Ampere and Ada: arguments, results and rounding are the same."""
    product, rotation = joined(qkv, rotation)
    tokens, kv_heads = product.rows.shape[:2]
    pages: tuple[Pages, Pages] = jax.tree.map(jax.new_ref, (k_pages, v_pages))
    queries = plgpu.kernel(
        partial(_run, rows=rows),
        out_type=query_types(product, rows),
        grid=(product.group + 2, kv_heads, pl.cdiv(tokens, TOKENS)),
        grid_names=("row", "head", "tile"),
        kernel_name="kv_write",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(Inputs(pages, product, page_ids, offsets, rotation))
    written: tuple[Pages, Pages] = jax.tree.map(jax.freeze, pages)
    return queries_of(queries, rows), written


def _run(inputs: Inputs, *queries: Any, rows: int) -> None:
    row, head, tile = (lax.axis_index(name) for name in ("row", "head", "tile"))
    product, norm, group = inputs.product.rows, inputs.product.norm, inputs.product.group
    tokens, kv_heads, lines, head_dim = product.shape
    pairs = 0 if inputs.rotation is None else inputs.rotation[0].shape[1]
    places, layout = parts_of(pairs, head_dim), layout_of(pairs, head_dim)
    of_row = layout.reduce(1)
    place = plgpu.broadcasted_iota(jnp.int32, (TOKENS,), 0, layout=of_row) + tile * TOKENS
    real, token = place < tokens, jnp.minimum(place, tokens - 1)

    def columns(part: Any) -> Any:
        return plgpu.broadcasted_iota(jnp.int32, (TOKENS, part.size), 1, layout=layout) + part.start

    def load(ref: Any, line: Any, part: Any) -> Any:
        lines = spread(line, part.size, layout)
        return gathered(ref, lines, columns(part), layout).astype(jnp.float32)

    def put(ref: Any, line: Any, parts: list[Any]) -> None:
        for part, values in zip(places, parts, strict=True):
            lines = spread(line, part.size, layout)
            scattered(ref, lines, columns(part), values.astype(ref.dtype), layout)

    def taken() -> list[Any]:
        return [load(product, (token * kv_heads + head) * lines + row, part) for part in places]

    def turned(weight: Any) -> list[Any]:
        """The rows, normalized and rotated."""
        parts = taken()
        if norm is not None:
            by_column = partial(plgpu.load, layout=layout.reduce(0), optimized=False)
            factors = [by_column(weight.at[part]).astype(jnp.float32) + norm.offset for part in places]
            parts = normalized(parts, factors, norm.eps, layout)
        if inputs.rotation is not None:
            parts = rotated(parts, [load(side, token, pl.ds(0, pairs)) for side in inputs.rotation])
        return parts

    def put_queries() -> None:
        parts, first = turned(None if norm is None else norm.q), 0
        for ref in queries:
            line = ((token - first) * kv_heads + head) * group + row
            put(ref, jnp.where(real & (token >= first) & (token < first + ref.shape[0]), line, -1), parts)
            first += ref.shape[0]

    def write(pages: Any, rows_of: Callable[[], list[Any]]) -> None:
        page, offset = (gathered(ref, 0, token, of_row) for ref in (inputs.page_ids, inputs.offsets))
        written, parts = real & (page > 0), rows_of()
        values = pages.values if isinstance(pages, Quantized) else pages
        at = jnp.where(written, (page * values.shape[1] + head) * values.shape[2] + offset, -1)
        if not isinstance(pages, Quantized):
            put(values, at, parts)
            return
        rounded = [x.astype(product.dtype).astype(jnp.float32) for x in parts]
        parts, scale = scaled(rounded, pages.kind, layout)
        put(values, at, [stored(x, pages.kind) for x in parts])
        of_page = jnp.where(written, page * pages.scale.shape[1] + head, -1)
        scattered(pages.scale, of_page, offset, scale, of_row)

    pl.when(row < group)(put_queries)
    pl.when(row == group)(partial(write, inputs.pages[0], lambda: turned(None if norm is None else norm.k)))
    pl.when(row == group + 1)(partial(write, inputs.pages[1], taken))


def stored(x: jax.Array, kind: str) -> jax.Array:
    """Float32 numbers within the range of a cache's numbers, rounded to int8 or else to the bits of
    float8_e4m3fn, for which GPUs before 8.9 have no instruction.
    """
    if kind == "int8":
        return jnp.round(x).astype(jnp.int8)
    bits, magnitude = lax.bitcast_convert_type(x, jnp.int32), jnp.abs(x)
    wide = lax.bitcast_convert_type(magnitude, jnp.int32)
    # to 3 of 23 bits of the mantissa, to the nearest or else even number; the exponent's bias is 7, not 127
    normal = ((wide + ((1 << 19) - 1) + ((wide >> 20) & 1)) >> 20) - (120 << 3)
    # numbers near 2^14 are multiples of 2^-9
    small = lax.bitcast_convert_type(magnitude + 2.0**14, jnp.int32) & 15
    code = jnp.where(magnitude < SUBNORMAL, small, normal) | ((bits >> 24) & 0x80)
    return code.astype(jnp.uint8)
