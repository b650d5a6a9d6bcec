"""The memory warpgroup's work: blocks of keys and values from their pages to shared memory, as the tensor cores take them.

What no query sees becomes zeros among the values: its weights are zeros, and 0 * NaN is NaN. Eight-bit numbers are converted on
their way, once for all of a block's queries: TMA copies them to a place of their own, and this warpgroup takes them from there
through its registers, while TMA copies those that come next.
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

from pallas_kernels.hopper import COLUMNS, ROWS, tiled
from pallas_kernels.ptx import TENSOR


class Ring(NamedTuple):
    """Places for keys or for values.

    Attributes:
        smem: [stages, block_k, head_dim] in the queries' dtype.
        full, free: a barrier for each stage; `full` has one more, for values that are cleared before they are handed on.
        scale: float32 [stages, block_k], of eight-bit numbers.
        raw, raw_scale, raw_full: a block of these as it is stored, and their barrier.
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
    """What is read: the blocks start, ..., start + count - 1 of a sequence's tokens, of which [first, end) are seen; page ids by token."""

    start: jax.Array
    count: jax.Array
    first: jax.Array
    end: jax.Array
    page: Callable[[jax.Array], jax.Array]
    kv_head: jax.Array


def ring(pages: Any, dtype: jnp.dtype[Any], stages: int, block_k: int, readers: int) -> Ring:
    """For pages [num_pages, kv_heads, page_size, head_dim] and warpgroups that read."""
    page_size, head_dim = pages.shape[2:]
    copies = block_k // math.gcd(page_size, block_k)
    smem, free = tiled((stages, block_k, head_dim), dtype), plgpu.Barrier(num_arrivals=readers, num_barriers=stages)
    if pages.dtype == dtype:
        return Ring(smem, plgpu.Barrier(num_arrivals=copies, num_barriers=stages + 1), free)
    scale, raw_scale = (plgpu.SMEM(shape, jnp.float32) for shape in ((stages, block_k), (block_k,)))
    raw = tiled((block_k, head_dim), pages.dtype)
    return Ring(smem, plgpu.Barrier(num_barriers=stages), free, scale, raw, raw_scale, plgpu.Barrier(num_arrivals=2 * copies))


def feed(blocks: Blocks, k: Ring, v: Ring, k_ref: Any, v_ref: Any, k_scale_ref: Any = None, v_scale_ref: Any = None) -> None:
    """Fill the rings; returns when every slot is free again, so that every barrier phase is observed."""
    stages, block_k, _ = k.smem.shape
    page_size = k_ref.shape[2]
    piece = math.gcd(page_size, block_k)  # of a page that one copy takes
    places = range(0, block_k, piece)

    def token_of(i: jax.Array) -> Any:
        return (blocks.start + i) * block_k

    def pages_of(i: jax.Array) -> list[jax.Array]:
        return [blocks.page(token_of(i) + at) for at in places]

    def copy(i: jax.Array, pages: list[jax.Array], ref: Any, smem: Any, full: Any) -> None:
        # Scales of 16 tokens lie 64 bytes apart, where only a plain copy may begin, without a tensor map's check of bounds.
        narrow = len(smem.shape) == 1 and piece * smem.dtype.itemsize % TENSOR
        mode = plgpu.OOBFillMode.PROMISE_IN_BOUNDS if narrow else None
        for at, page in zip(places, pages, strict=True):
            part_of_page = pl.ds(lax.rem(token_of(i) + at, page_size), piece)
            plgpu.copy_gmem_to_smem(ref.at[page, blocks.kv_head, part_of_page], smem.at[pl.ds(at, piece)], full, oob_mode=mode)

    def is_whole(i: jax.Array) -> Any:
        return (token_of(i) >= blocks.first) & (token_of(i) + block_k <= blocks.end)

    def cleared(i: jax.Array, at: int, x: jax.Array, layout: Any) -> jax.Array:
        tokens = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout) + (token_of(i) + at)
        return jnp.where((tokens >= blocks.first) & (tokens < blocks.end), x, jnp.zeros_like(x))

    def wait_until_free(i: jax.Array, ring: Ring) -> None:
        pl.when(i >= stages)(partial(plgpu.barrier_wait, ring.free.at[lax.rem(i, stages)]))

    def plain(i: jax.Array) -> None:
        slot, pages = lax.rem(i, stages), pages_of(i)
        wait_until_free(i, k)
        copy(i, pages, k_ref, k.smem.at[slot], k.full.at[slot])
        wait_until_free(i, v)
        copy(i, pages, v_ref, v.smem.at[slot], v.full.at[jnp.where(is_whole(i), slot, stages)])

        @pl.when(jnp.logical_not(is_whole(i)))
        def clear() -> None:
            plgpu.barrier_wait(v.full.at[stages])
            for rows, columns in _parts(block_k, v.smem.shape[-1]):
                values = v.smem.at[slot, rows, columns]
                values[...] = cleared(i, rows.start, plgpu.load(values, layout=plgpu.Layout.WGMMA), plgpu.Layout.WGMMA)
            plgpu.commit_smem()
            for _ in places:
                plgpu.barrier_arrive(v.full.at[slot])

    def fetch(i: jax.Array, pages: list[jax.Array], ref: Any, scale_ref: Any, ring: Ring) -> None:
        copy(i, pages, ref, ring.raw, ring.raw_full)
        copy(i, pages, scale_ref, ring.raw_scale, ring.raw_full)

    def convert(i: jax.Array, ring: Ring) -> None:
        slot, line, wide = lax.rem(i, stages), plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA_UPCAST_2X
        for at in range(0, block_k, ROWS):
            rows = pl.ds(at, ROWS)
            ring.scale[slot, rows] = cleared(i, at, plgpu.load(ring.raw_scale.at[rows], layout=line), line)
        for rows, columns in _parts(block_k, ring.smem.shape[-1]):
            x = _widened(plgpu.load(ring.raw.at[rows, columns], layout=wide), ring.smem.dtype)
            clear = partial(cleared, i, rows.start, layout=wide)
            ring.smem[slot, rows, columns] = lax.cond(is_whole(i), lambda x: x, clear, x)

    def eight_bits(i: jax.Array) -> None:
        slot, pages = lax.rem(i, stages), pages_of(i + 1)
        for ref, scale_ref, ring in ((k_ref, k_scale_ref, k), (v_ref, v_scale_ref, v)):
            plgpu.barrier_wait(ring.raw_full)
            wait_until_free(i, ring)
            convert(i, ring)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ring.full.at[slot])
            pl.when(i + 1 < blocks.count)(partial(fetch, i + 1, pages, ref, scale_ref, ring))

    if k.raw is None:
        pl.loop(0, blocks.count)(plain)
    else:

        @pl.when(blocks.count > 0)
        def begin() -> None:
            i = jnp.int32(0)
            pages = pages_of(i)
            fetch(i, pages, k_ref, k_scale_ref, k)
            fetch(i, pages, v_ref, v_scale_ref, v)

        pl.loop(0, blocks.count)(eight_bits)

    @pl.loop(0, jnp.minimum(blocks.count, stages))
    def finish(slot: jax.Array) -> None:
        plgpu.barrier_wait(k.free.at[slot])
        plgpu.barrier_wait(v.free.at[slot])


def _parts(rows: int, columns: int) -> list[tuple[Any, Any]]:
    """Pieces of [rows, columns] that are small enough for the few registers of the memory warpgroup."""
    return [(pl.ds(at, ROWS), pl.ds(column, COLUMNS)) for at in range(0, rows, ROWS) for column in range(0, columns, COLUMNS)]


def _widened(x: jax.Array, dtype: jnp.dtype[Any]) -> jax.Array:
    """Eight-bit numbers in dtype, exactly; fp8 reaches bfloat16 only by way of float32."""
    return x.astype(dtype) if x.dtype == jnp.int8 or dtype == jnp.float16 else x.astype(jnp.float32).astype(dtype)
