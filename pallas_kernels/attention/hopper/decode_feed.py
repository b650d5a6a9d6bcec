"""The memory warpgroup of decode attention: copies the tiles of a block's items from their pages to shared
memory.

Tiles follow each other in a ring across item boundaries, so an item's first tiles arrive while the previous
item is computed. Values of tokens that no query of the item sees are set to zero: their weights are zero, but
0 * NaN is NaN. Tiles of an eight-bit cache are copied as stored, with their scales. The memory warpgroup
converts them exactly: values to the queries' dtype, keys to float16, which takes fewer instructions than
bfloat16; see `QUERY_UNIT`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.mosaic_gpu import Tiling
from jaxlib.mlir import ir

from pallas_kernels.attention.work_list import TILE
from pallas_kernels.mosaic.hopper import COLUMNS, tiled
from pallas_kernels.mosaic.words import asm
from pallas_kernels.quantization.quantized import Pages, Quantized

# bytes of keys and values in flight; two pairs of warpgroups fit on a multiprocessor, or one with head_dim
# 256
STAGE_BYTES = 1 << 16
QUERY_UNIT = 2.0**-6  # of queries in bfloat16 that are multiplied in float16: up to 4e6, and to within 2e-6


class WorkItem(NamedTuple):
    """An item of a work list, as int32 scalars; see `WorkList.items`.

    Row i of the item sees length + i tokens.
    """

    row: jax.Array
    kv_head: jax.Array
    start: jax.Array
    tiles: jax.Array
    length: jax.Array
    slot: jax.Array
    join: jax.Array
    rows: jax.Array

    @property
    def end(self) -> jax.Array:
        """The length of the last row."""
        return self.length + self.rows - 1

    @staticmethod
    def read(ref: Any, index: Any) -> WorkItem:
        return WorkItem(*(ref[index, field] for field in range(len(WorkItem._fields))))


class Slots(NamedTuple):
    """Keys or values: those in flight in shared memory, and their pages. Barriers are of all pairs of
    warpgroups, one pair after another; arrays have an axis of pairs first if a block has several.

    Attributes:
        eight, scale: for an eight-bit cache, tiles as stored [tiles ahead, TILE, head_dim] and their scales
            [more, TILE].
        free, full: barriers, one per stage and pair of warpgroups.
        smem: [stages, TILE, head_dim] in the dtype of the product.
        pages: [num_pages, kv_heads, page_size, head_dim], followed by their scales for an eight-bit cache; of
            a pair, see `of_pair`.
    """

    eight: Any
    free: Any
    full: Any
    scale: Any
    smem: Any
    pages: Any = ()

    def of_pair(self, pages: Any, pair: jax.Array | None) -> Slots:
        """A pair's arrays, all barriers, and the pages; pair: as in `Feed`."""
        eight, scale, smem = (
            ref if ref is None or pair is None else ref.at[pair]
            for ref in (self.eight, self.scale, self.smem)
        )
        sources = (pages,) if eight is None else (pages.values, pages.scale)
        return self._replace(eight=eight, scale=scale, smem=smem, pages=sources)


class PagesInFlight(NamedTuple):
    """Keys and values in flight in shared memory; `arrived`: see `Feed`."""

    arrived: Any
    k: Slots
    v: Slots


def product_dtype(dtype: jnp.dtype[Any], pages: Pages) -> jnp.dtype[Any]:
    """The dtype in which queries of a dtype are multiplied with keys."""
    return jnp.dtype(jnp.float16) if isinstance(pages, Quantized) else dtype


def ring_of(dtype: jnp.dtype[Any], pages: Pages, pairs: int) -> PagesInFlight:
    """Types of shared memory and barriers for keys and values in flight."""
    page_size, head_dim = pages.shape[2:]
    copies = TILE // min(page_size, TILE)
    of_pairs = (pairs,) if pairs > 1 else ()
    eight = scale = None
    if isinstance(pages, Quantized):
        small = head_dim < 256
        ahead, stages = (4, 2) if small else (2, 1)
        # scales are still read while the next tile's keys are converted
        scale = plgpu.SMEM((*of_pairs, ahead + stages + 1, TILE), jnp.float32)
        eight = tiled((*of_pairs, ahead, TILE, head_dim), pages.values.dtype, min(head_dim, 2 * COLUMNS))
        arrived = plgpu.Barrier(num_arrivals=4 * copies, num_barriers=pairs * ahead)
        copies = 1  # the memory warpgroup writes these tiles itself
    else:
        stages = max(2, STAGE_BYTES // (2 * TILE * head_dim * dtype.itemsize))
        arrived = plgpu.Barrier(num_arrivals=copies, num_barriers=pairs)
    slots = Slots(
        eight=eight,
        free=plgpu.Barrier(num_barriers=pairs * stages),
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=pairs * stages),
        scale=scale,
        smem=tiled((*of_pairs, stages, TILE, head_dim), dtype),
    )
    keys = tiled((*of_pairs, stages, TILE, head_dim), product_dtype(dtype, pages))
    return PagesInFlight(arrived, slots._replace(smem=keys), slots)


@dataclass(frozen=True)
class Feed:
    """Copies keys and values for one pair of warpgroups.

    Attributes:
        items, tables: the work list's items and the block tables.
        window: tokens that a query sees; None: all.
        arrived: for an eight-bit cache, a barrier per tile ahead; otherwise one, for values that are cleared
            before they are released to the compute warpgroup. Each pair of warpgroups has its own.
        pair: index of the pair of warpgroups in the block; None if the block has a single pair.
        in_registers: False: convert by operations that Pallas interprets.
    """

    k: Slots
    v: Slots
    items: Any
    tables: Any
    window: int | None
    arrived: Any
    pair: jax.Array | None
    in_registers: bool

    def stage(self, number: Any) -> Any:
        """Index of the stage barrier for the tile with this number in the block."""
        return self._own(number, self.k.smem.shape[0])

    def _own(self, number: Any, each: int) -> Any:
        """Index of this pair's barrier for a number, in a ring with `each` barriers per pair."""
        slot = lax.rem(number, each)
        return slot if self.pair is None else self.pair * each + slot

    def run(self, first: jax.Array, end: jax.Array) -> None:
        """Copies all tiles of the items. Returns when every slot is free again, so that every barrier phase
        is observed.
        """
        done = (self._plain if self.k.eight is None else self._eight_bits)(first, end)
        for slot in range(self.k.smem.shape[0]):
            for side in (self.k, self.v):
                pl.when(slot < done)(partial(plgpu.barrier_wait, side.free.at[self.stage(jnp.int32(slot))]))

    @property
    def _page_size(self) -> int:
        size: int = self.k.pages[0].shape[2]
        return size

    @property
    def _places(self) -> range:
        """Offsets in a tile at which pieces of pages begin."""
        return range(0, TILE, min(self._page_size, TILE))

    def _page_ids(self, item: WorkItem, tile: jax.Array) -> list[jax.Array]:
        token, last = (item.start + tile) * TILE, lax.div(item.end - 1, self._page_size)
        return [
            self.tables[item.row, jnp.minimum(lax.div(token + at, self._page_size), last)]
            for at in self._places
        ]

    def _copy(
        self, ref: Any, smem: Any, arrived: Any, item: WorkItem, tile: jax.Array, pages: list[jax.Array]
    ) -> None:
        piece, token = self._places.step, (item.start + tile) * TILE
        for at, page in zip(self._places, pages, strict=True):
            part = ref.at[page, item.kv_head, pl.ds(lax.rem(token + at, self._page_size), piece)]
            plgpu.copy_gmem_to_smem(
                part, smem.at[pl.ds(at, piece)], arrived, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            )

    def _is_whole(self, item: WorkItem, tile: jax.Array) -> jax.Array:
        token = (item.start + tile) * TILE
        in_sequence = token + TILE <= item.end
        return in_sequence if self.window is None else in_sequence & (token >= item.length - self.window)

    def _cleared(self, item: WorkItem, tile: jax.Array, values: jax.Array, layout: Any) -> jax.Array:
        return jnp.where(self.used(item, tile, values.shape, layout), values, jnp.zeros_like(values))

    def used(self, item: WorkItem, tile: jax.Array, shape: tuple[int, ...], layout: Any) -> jax.Array:
        """Mask of this shape: whether any row of the item sees each token of its tile. Tokens are along the
        first axis.
        """
        return seen(tokens_of(item, tile, shape, 0, layout), item.length, item.end, self.window)

    def _plain(self, first: jax.Array, end: jax.Array) -> jax.Array:
        k, v, (stages, _, head_dim) = self.k, self.v, self.k.smem.shape

        def one_item(index: jax.Array, done: jax.Array) -> jax.Array:
            item = WorkItem.read(self.items, index)

            @pl.loop(0, item.tiles)
            def one_tile(tile: jax.Array) -> None:
                number = done + tile
                slot, stage, pages = lax.rem(number, stages), self.stage(number), self._page_ids(item, tile)
                pl.when(number >= stages)(partial(plgpu.barrier_wait, k.free.at[stage]))
                self._copy(k.pages[0], k.smem.at[slot], k.full.at[stage], item, tile, pages)
                pl.when(number >= stages)(partial(plgpu.barrier_wait, v.free.at[stage]))
                whole, copy = self._is_whole(item, tile), partial(self._copy, v.pages[0], v.smem.at[slot])
                pl.when(whole)(partial(copy, v.full.at[stage], item, tile, pages))

                @pl.when(jnp.logical_not(whole))
                def clear() -> None:
                    arrived = self.arrived if self.pair is None else self.arrived.at[self.pair]
                    copy(arrived, item, tile, pages)
                    plgpu.barrier_wait(arrived)
                    for at in range(0, head_dim, COLUMNS):
                        values = v.smem.at[slot, :, pl.ds(at, COLUMNS)]
                        loaded = plgpu.load(values, layout=plgpu.Layout.WGMMA)
                        values[...] = self._cleared(item, tile, loaded, plgpu.Layout.WGMMA)
                    plgpu.commit_smem()
                    for _ in self._places:
                        plgpu.barrier_arrive(v.full.at[stage])

            return done + item.tiles

        done: jax.Array = lax.fori_loop(first, end, one_item, jnp.int32(0))
        return done

    def _convert(
        self, eight: Any, smem: Any, clear: Callable[[jax.Array, Any], jax.Array] | None = None
    ) -> None:
        """Converts a tile's eight-bit numbers."""
        width = min(smem.shape[1], 128)
        for at in range(0, smem.shape[1], width):
            columns, layout = pl.ds(at, width), _wide(width)
            loaded = plgpu.load(eight.at[:, columns], layout=layout)
            numbers = _numbers(loaded, smem.dtype, layout if self.in_registers else None)
            smem[:, columns] = numbers if clear is None else clear(numbers, layout)
        plgpu.commit_smem()

    def _eight_bits(self, first: jax.Array, end: jax.Array) -> jax.Array:
        stages, ahead = self.k.smem.shape[0], self.k.eight.shape[0]

        def fetch(cursor: _Cursor) -> None:
            for side in (self.k, self.v):
                for ref, smem in zip(side.pages, (side.eight, side.scale), strict=True):
                    to = smem.at[lax.rem(cursor.number, smem.shape[0])]
                    arrived = self.arrived.at[self._own(cursor.number, ahead)]
                    self._copy(ref, to, arrived, cursor.item, cursor.tile, cursor.pages)

        def after(cursor: _Cursor) -> _Cursor:
            """The next tile. After the last tile, an arbitrary but defined one."""
            ends = cursor.tile + 1 == cursor.item.tiles
            place = cursor.place + ends.astype(jnp.int32)
            item = lax.cond(
                ends & (place < end), lambda: WorkItem.read(self.items, place), lambda: cursor.item
            )
            tile = jnp.where(ends, 0, cursor.tile + 1)
            return _Cursor(place, item, tile, cursor.number + 1, self._page_ids(item, tile))

        def step(item: WorkItem, done: jax.Array, tile: jax.Array, cursor: _Cursor) -> _Cursor:
            number = done + tile
            slot, into, stage = lax.rem(number, ahead), lax.rem(number, stages), self.stage(number)
            following = after(cursor)  # loads its page ids while this tile is converted
            plgpu.barrier_wait(self.arrived.at[self._own(number, ahead)])
            pl.when(number >= stages)(partial(plgpu.barrier_wait, self.k.free.at[stage]))
            self._convert(self.k.eight.at[slot], self.k.smem.at[into])
            plgpu.barrier_arrive(self.k.full.at[stage])
            pl.when(number >= stages)(partial(plgpu.barrier_wait, self.v.free.at[stage]))
            convert, whole = (
                partial(self._convert, self.v.eight.at[slot], self.v.smem.at[into]),
                self._is_whole(item, tile),
            )
            pl.when(whole)(convert)
            pl.when(jnp.logical_not(whole))(partial(convert, partial(self._cleared, item, tile)))
            plgpu.barrier_arrive(self.v.full.at[stage])
            pl.when(cursor.place < end)(partial(fetch, cursor))
            return following

        def one_item(index: jax.Array, carry: tuple[jax.Array, _Cursor]) -> tuple[jax.Array, _Cursor]:
            (done, cursor), item = carry, WorkItem.read(self.items, index)
            cursor = lax.fori_loop(0, item.tiles, partial(step, item, done), cursor)
            return done + item.tiles, cursor

        def begin() -> jax.Array:
            item, zero = WorkItem.read(self.items, first), jnp.int32(0)
            cursor = _Cursor(first, item, zero, zero, self._page_ids(item, zero))
            for _ in range(ahead):
                pl.when(cursor.place < end)(partial(fetch, cursor))
                cursor = after(cursor)
            done: jax.Array = lax.fori_loop(first, end, one_item, (zero, cursor))[0]
            return done

        fed: jax.Array = lax.cond(first < end, begin, lambda: jnp.int32(0))
        return fed


class _Cursor(NamedTuple):
    """The next tile to fetch: its item's index in the list, the item, the tile's index in the item and in the
    block, and its page ids.
    """

    place: jax.Array
    item: WorkItem
    tile: jax.Array
    number: jax.Array
    pages: list[jax.Array]


def seen(tokens: jax.Array, shortest: jax.Array, longest: jax.Array, window: int | None) -> jax.Array:
    """Whether any row sees each token, of rows with all lengths from `shortest` to `longest`."""
    in_sequence = tokens < longest
    return in_sequence if window is None else in_sequence & (tokens >= shortest - window)


def tokens_of(item: WorkItem, tile: jax.Array, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """The tokens of an item's tile, along `axis` of an array of this shape."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) + (item.start + tile) * TILE


def _numbers(x: jax.Array, dtype: jnp.dtype[Any], layout: Any) -> jax.Array:
    """Converts int8, or the bits of float8_e4m3fn, to a dtype that represents them exactly.

    Args:
        layout: of x. None: use only operations that Pallas interprets.
    """
    if x.dtype == jnp.int8 and layout is not None:
        returned = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=layout)
        widened = _to_float16 if dtype == jnp.float16 else _to_bfloat16
        numbers: jax.Array = plgpu.inline_mgpu(arg_types=(layout,), return_type=returned)(widened)(x)
        return numbers
    if x.dtype == jnp.int8:
        return x.astype(dtype)
    # the hardware converts float8 to float16
    return lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float16).astype(dtype)


def _to_float16(_: Any, x: Any) -> Any:
    """int8 -> float16: of 1024 + 128 + x, the lowest bits are x with its sign flipped."""
    pair = """{{
        .reg .b32 n, k;
        prmt.b32 n, $1, 0x64646464, {};
        mov.b32 k, 0x64806480;
        sub.f16x2 $0, n, k;
    }}"""
    return _pairs(x, ir.F16Type.get(), pair, lambda word: asm("xor.b32 $0, $1, 0x80808080;", word))


def _to_bfloat16(_: Any, x: Any) -> Any:
    """int8 -> bfloat16: of 128 + x, seven bits are x's; its sign doubles the 128 that is subtracted."""
    pair = """{{
        .reg .b32 n, low, power;
        mov.b32 power, 0x43004300;
        prmt.b32 n, $1, 0, {};
        lop3.b32 low, n, 0x007f007f, power, 0xea;
        lop3.b32 n, n, 0x00800080, power, 0xea;
        sub.bf16x2 $0, low, n;
    }}"""
    return _pairs(x, ir.BF16Type.get(), pair, lambda word: word)


def _pairs(x: Any, dtype: Any, code: str, first: Callable[[Any], Any]) -> Any:
    """Numbers of two bytes from pairs of bytes, by code that picks these from words which `first` changes."""
    i32, count = ir.IntegerType.get_signless(32), x.layout.vector_length
    registers = np.empty_like(x.registers)
    for at, register in np.ndenumerate(x.registers):
        words = [first(mgpu.utils.vector_slice(register, slice(i, i + 4))) for i in range(0, count, 4)]
        pairs = [asm(code.format(picks), word) for word in words for picks in ("0x4140", "0x4342")]
        vectors = [mgpu.utils.bitcast(pair, ir.VectorType.get((1,), i32)) for pair in pairs]
        numbers = mgpu.utils.vector_concat(vectors)
        registers[at] = mgpu.utils.bitcast(numbers, ir.VectorType.get((count,), dtype))
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def _wide(width: int) -> Any:
    """Layout of [n, width]: each thread reads eight adjacent bytes and writes eight adjacent numbers; a few
    threads share a row.
    """
    rows = 256 // width  # per warp
    tiles = Tiling(((4 * rows, width), (rows, width), (8,)))
    return plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
