"""The memory warpgroup of prefill attention: copies blocks of keys and values from their pages to shared
memory.

Values of tokens that no query sees are set to zero: their weights are zero, but 0 * NaN is NaN. Eight-bit
numbers are converted once for all queries of a thread block: TMA copies them to a separate buffer, and this
warpgroup converts them in its registers. TMA then fetches the next block of keys while this block's values
are converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.hopper import COLUMNS, ROWS, tiled

ALIGNED = 128  # bytes, in shared memory, for a copy with a tensor map


class Ring(NamedTuple):
    """Buffers and barriers for keys or for values.

    Attributes:
        smem: [stages, block_k, head_dim] in the queries' dtype.
        full, free: a barrier per stage; `full` has one more, for values that are cleared before they are
            released.
        scale: float32 [stages, block_k], for an eight-bit cache.
        raw, raw_scale, raw_full: for an eight-bit cache, a block as stored, its scales, and the barrier of
            their copies.
    """

    smem: Any
    full: Any
    free: Any
    scale: Any = None
    raw: Any = None
    raw_scale: Any = None
    raw_full: Any = None


@dataclass(frozen=True)
class Blocks:
    """Blocks start, ..., start + count - 1 of a sequence's tokens. Queries see tokens [first, end). `page`
    gives a token's page id.
    """

    start: jax.Array
    count: jax.Array
    first: jax.Array
    end: jax.Array
    page: Callable[[jax.Array], jax.Array]
    kv_head: jax.Array


def ring(pages: Any, dtype: jnp.dtype[Any], stages: int, block_k: int, readers: int) -> Ring:
    """The ring for pages [num_pages, kv_heads, page_size, head_dim], read by this number of warpgroups."""
    page_size, head_dim = pages.shape[2:]
    copies = block_k // math.gcd(page_size, block_k)
    smem, free = (
        tiled((stages, block_k, head_dim), dtype),
        plgpu.Barrier(num_arrivals=readers, num_barriers=stages),
    )
    if pages.dtype == dtype:
        return Ring(smem, plgpu.Barrier(num_arrivals=copies, num_barriers=stages + 1), free)
    scale, raw_scale = (plgpu.SMEM(shape, jnp.float32) for shape in ((stages, block_k), (block_k,)))
    raw = tiled((block_k, head_dim), pages.dtype)
    return Ring(
        smem,
        plgpu.Barrier(num_barriers=stages),
        free,
        scale,
        raw,
        raw_scale,
        plgpu.Barrier(num_arrivals=2 * copies),
    )


def feed(
    items: jax.Array,
    blocks_at: Callable[[jax.Array], Blocks],
    k: Ring,
    v: Ring,
    k_ref: Any,
    v_ref: Any,
    k_scale_ref: Any = None,
    v_scale_ref: Any = None,
) -> None:
    """Copies the keys and values of items in order, as far ahead of the readers as the rings allow.

    Returns when every slot is free again, so that every barrier phase is observed.

    Args:
        items: number of items.
        blocks_at: returns the blocks of the n-th item, for n from 0 to items - 1. Items without blocks come
            last.
    """
    stages, block_k, _ = k.smem.shape
    page_size = k_ref.shape[2]
    piece = math.gcd(page_size, block_k)  # tokens per copy
    places = range(0, block_k, piece)

    def token_of(blocks: Blocks, i: jax.Array) -> Any:
        return (blocks.start + i) * block_k

    def copy(blocks: Blocks, i: jax.Array, pages: list[jax.Array], ref: Any, smem: Any, full: Any) -> None:
        # Scales of 16 tokens are 64 bytes apart. Only a plain copy, without a tensor map's bounds check, may
        # begin there.
        narrow = len(smem.shape) == 1 and piece * smem.dtype.itemsize % ALIGNED
        mode = plgpu.OOBFillMode.PROMISE_IN_BOUNDS if narrow else None
        for at, page in zip(places, pages, strict=True):
            part_of_page = pl.ds(lax.rem(token_of(blocks, i) + at, page_size), piece)
            plgpu.copy_gmem_to_smem(
                ref.at[page, blocks.kv_head, part_of_page], smem.at[pl.ds(at, piece)], full, oob_mode=mode
            )

    def pages_of(blocks: Blocks, i: jax.Array) -> list[jax.Array]:
        return [blocks.page(token_of(blocks, i) + at) for at in places]

    def is_whole(blocks: Blocks, i: jax.Array) -> Any:
        return (token_of(blocks, i) >= blocks.first) & (token_of(blocks, i) + block_k <= blocks.end)

    def cleared(blocks: Blocks, i: jax.Array, at: int, x: jax.Array, layout: Any) -> jax.Array:
        tokens = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout) + (token_of(blocks, i) + at)
        return jnp.where((tokens >= blocks.first) & (tokens < blocks.end), x, jnp.zeros_like(x))

    def wait_until_free(nth: jax.Array, ring: Ring) -> None:
        pl.when(nth >= stages)(partial(plgpu.barrier_wait, ring.free.at[lax.rem(nth, stages)]))

    def plain(blocks: Blocks, done: jax.Array) -> None:
        @pl.loop(0, blocks.count)
        def _(i: jax.Array) -> None:
            nth, pages = done + i, pages_of(blocks, i)
            slot, whole = lax.rem(nth, stages), is_whole(blocks, i)
            wait_until_free(nth, k)
            copy(blocks, i, pages, k_ref, k.smem.at[slot], k.full.at[slot])
            wait_until_free(nth, v)
            copy(blocks, i, pages, v_ref, v.smem.at[slot], v.full.at[jnp.where(whole, slot, stages)])

            @pl.when(jnp.logical_not(whole))
            def clear() -> None:
                plgpu.barrier_wait(v.full.at[stages])
                for rows, columns in _parts(block_k, v.smem.shape[-1]):
                    values = v.smem.at[slot, rows, columns]
                    loaded = plgpu.load(values, layout=plgpu.Layout.WGMMA)
                    values[...] = cleared(blocks, i, rows.start, loaded, plgpu.Layout.WGMMA)
                plgpu.commit_smem()
                for _ in places:
                    plgpu.barrier_arrive(v.full.at[slot])

    sources = (k_ref, k_scale_ref, k), (v_ref, v_scale_ref, v)

    def fetch(
        blocks: Blocks, i: jax.Array, pages: list[jax.Array], ref: Any, scale_ref: Any, ring: Ring
    ) -> None:
        copy(blocks, i, pages, ref, ring.raw, ring.raw_full)
        copy(blocks, i, pages, scale_ref, ring.raw_scale, ring.raw_full)

    def fetch_first(number: jax.Array) -> None:
        blocks, i = blocks_at(number), jnp.int32(0)

        @pl.when(blocks.count > 0)
        def _() -> None:
            pages = pages_of(blocks, i)
            for source in sources:
                fetch(blocks, i, pages, *source)

    def convert(blocks: Blocks, i: jax.Array, slot: jax.Array, ring: Ring) -> None:
        line, wide = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA_UPCAST_2X
        for at in range(0, block_k, ROWS):
            rows = pl.ds(at, ROWS)
            ring.scale[slot, rows] = cleared(
                blocks, i, at, plgpu.load(ring.raw_scale.at[rows], layout=line), line
            )
        for rows, columns in _parts(block_k, ring.smem.shape[-1]):
            x = _widened(plgpu.load(ring.raw.at[rows, columns], layout=wide), ring.smem.dtype)
            clear = partial(cleared, blocks, i, rows.start, layout=wide)
            ring.smem[slot, rows, columns] = lax.cond(is_whole(blocks, i), lambda x: x, clear, x)

    def eight_bits(blocks: Blocks, done: jax.Array) -> None:
        @pl.loop(0, blocks.count)
        def _(i: jax.Array) -> None:
            nth, pages = done + i, pages_of(blocks, i + 1)
            slot = lax.rem(nth, stages)
            for source in sources:
                ring = source[-1]
                plgpu.barrier_wait(ring.raw_full)
                wait_until_free(nth, ring)
                convert(blocks, i, slot, ring)
                plgpu.commit_smem()
                plgpu.barrier_arrive(ring.full.at[slot])
                pl.when(i + 1 < blocks.count)(partial(fetch, blocks, i + 1, pages, *source))

    def fill(number: jax.Array, done: jax.Array) -> jax.Array:
        blocks = blocks_at(number)
        if k.raw is None:
            plain(blocks, done)
        else:
            eight_bits(blocks, done)
            pl.when(number + 1 < items)(partial(fetch_first, number + 1))
        return done + blocks.count

    if k.raw is not None:
        fetch_first(jnp.int32(0))
    done = lax.fori_loop(0, items, fill, jnp.int32(0))

    @pl.loop(jnp.maximum(done - stages, 0), done)
    def finish(nth: jax.Array) -> None:
        for ring in (k, v):
            plgpu.barrier_wait(ring.free.at[lax.rem(nth, stages)])


def _parts(rows: int, columns: int) -> list[tuple[Any, Any]]:
    """Pieces of [rows, columns] that are small enough for the few registers of the memory warpgroup."""
    return [
        (pl.ds(at, ROWS), pl.ds(column, COLUMNS))
        for at in range(0, rows, ROWS)
        for column in range(0, columns, COLUMNS)
    ]


def _widened(x: jax.Array, dtype: jnp.dtype[Any]) -> jax.Array:
    """Converts eight-bit numbers to dtype exactly. fp8 converts to bfloat16 only through float32."""
    return (
        x.astype(dtype)
        if x.dtype == jnp.int8 or dtype == jnp.float16
        else x.astype(jnp.float32).astype(dtype)
    )
