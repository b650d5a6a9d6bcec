"""Recurrent layers as models call them. Each row and tile reads a page of states and writes one."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jengine.execution.attention import TokenAxis
from jengine.execution.batch import Batch
from jengine.table.program_table import TrunkKey
from pallas_kernels.recurrence import delta_rule

ROWS_BYTES = 32 << 20  # bytes of states processed at once, which limits what rows need beside the cache


class Recurrence:
    """States by page: the convolution's [pages, taps - 1, channels], and the recurrence's [pages, heads,
    key_dim, value_dim]. A model may have only one of them.

    Rows come first, then tiles in order. Each reads what earlier ones wrote. So several tiles of a sequence
    fit in one step, and a prompt may start from a state that another prompt writes in the same step. Padding
    reads zeros and writes to the null page.

    In a step with drafts, a row reads what the row before it wrote if both are of one sequence. A CPU
    computes one row after the other, so that a state stays in its caches. A GPU computes rows side by side:
    all rows of a sequence begin with the state before the first, and only the last may write to its page.

    Args:
        following: maximum number of rows behind a sequence's first one.
        in_order: whether to compute rows one after the other.
    """

    def __init__(
        self, batch: Batch, axis: TokenAxis, key: TrunkKey, *, following: int, in_order: bool
    ) -> None:
        rows, tiles = (batch.row_states, batch.row_slots == 0), (batch.tile_states, batch.tile_positions == 0)
        self._rows, self._tiles = (((states[:, 0], states[:, 1]), fresh) for states, fresh in (rows, tiles))
        self._lengths, self._real, self._key = batch.tile_lengths, axis.real, key
        self._in_order, self._following = in_order, min(following, max(key.rows - 1, 0))
        if self._following and not in_order:
            self._behind = _behind(batch.row_slots, self._following)
            (sources, targets), fresh = self._rows
            self._rows = (sources[jnp.arange(key.rows) - self._behind], targets), fresh
        # traced and lowered once for all layers with the same arguments
        self.convolve = jax.jit(self._convolve)
        self.recur = jax.jit(self._recur)

    def _convolve(self, x: jax.Array, weight: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [N, channels], weight [channels, taps] -> float32 [N, channels], and the pages."""
        key, out = self._key, []
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
        if key.rows and self._in_order:
            lengths = jnp.ones(key.rows, jnp.int32)
            read, pages = _convolve_in_order(x[: key.rows, None], weight, pages, *self._rows, lengths)
            out.append(read)
        elif key.rows:
            read, pages = self._convolve_rows(x, weight, pages)
            out.append(read)
        if key.tiles:
            tiles = x[key.rows :].reshape(key.tiles, -1, x.shape[1])
            read, pages = _convolve_in_order(tiles, weight, pages, *self._tiles, self._lengths)
            out.append(read)
        return jnp.concatenate(out), pages

    def _convolve_rows(
        self, x: jax.Array, weight: jax.Array, pages: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Computes all rows side by side."""
        (sources, targets), fresh = self._rows
        if self._following:
            before = self._before(x[: self._key.rows], weight.shape[1] - 1, pages)
        else:
            before = _begin(pages[sources], fresh)
        if self._key.tiles:  # else XLA may read again after the update, from a copy of all pages
            before = lax.optimization_barrier(before)
        every = jnp.concatenate([before, x[: self._key.rows, None]], axis=1)
        pages = pages.at[targets].set(every[:, 1:])
        return _weighted(every, weight, 1)[:, 0], pages

    def _before(self, x: jax.Array, count: int, pages: jax.Array) -> jax.Array:
        """[rows, count, channels]: the inputs before each row: its page's, then rows of its sequence."""
        (sources, _), fresh = self._rows
        index = jnp.arange(count) + self._behind[:, None]  # in the page
        earlier = _begin(pages[sources[:, None], jnp.minimum(index, count - 1)], fresh)
        rows = jnp.pad(x, [(count, 0), (0, 0)])
        others = jnp.stack([rows[i : i + len(x)] for i in range(count)], axis=1)
        return jnp.where((index < count)[..., None], earlier, others)

    def _recur(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        decay: jax.Array,
        rate: jax.Array | None,
        pages: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the recurrence of all tokens. Returns float32 [N, heads, value_dim], and the pages.

        q and k are [N, key heads, key_dim], v [N, heads, value_dim], decay and rate [N, heads], all float32.
        Each key head is shared by the same number of consecutive heads. Without a rate: linear attention.
        """
        shared = v.shape[1] // q.shape[1]
        tokens = [x if x is v else jnp.repeat(x, shared, axis=1) for x in (q, k, v)] + [decay]
        tokens += [] if rate is None else [rate]
        key, out = self._key, []
        if key.rows:
            read, pages = self._recur_rows(tuple(x[: key.rows] for x in tokens), pages)
            out.append(read)
        if key.tiles:
            real = self._real[key.rows :]
            # padding must not change a state
            tokens = [jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x[key.rows :], 0) for x in tokens]
            read, pages = self._recur_tiles(tokens, pages)
            out.append(read)
        return jnp.concatenate(out), pages

    def _recur_rows(self, tokens: tuple[jax.Array, ...], pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes one row after the other, or side by side."""
        if self._in_order:
            pages, read = lax.scan(_one, pages, (*self._rows, tokens))
        elif self._following:
            _, k, v, *_ = tokens
            begun = pages, delta_rule.Earlier.none(self._following, k, v)
            (pages, _), read = self._in_parts(_following, begun, pages, tokens, self._behind)
        else:
            pages, read = self._in_parts(_several, pages, pages, tokens)
        return read, pages

    def _in_parts(self, some: Any, carry: Any, pages: jax.Array, *of_rows: Any) -> tuple[Any, jax.Array]:
        """Scans over some rows at a time, to bound the memory of their states."""
        rows, at_once = self._key.rows, max(ROWS_BYTES // (4 * math.prod(pages.shape[1:])), 1)
        parts = next(parts for parts in range(1, rows + 1) if rows % parts == 0 and rows // parts <= at_once)
        whole = *self._rows, *of_rows
        if parts == 1:
            return some(carry, whole)  # type: ignore[no-any-return]
        carry, read = lax.scan(some, carry, jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), whole))
        return carry, read.reshape(rows, *read.shape[2:])

    def _recur_tiles(self, tokens: list[jax.Array], pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes what does not depend on the state for all tiles at once, then the states in turn."""
        tiles = self._key.tiles
        size = tokens[0].shape[0] // tiles
        chunk = delta_rule.chunk_size(size)
        # heads before tokens
        cut = [jnp.moveaxis(x.reshape(tiles, size // chunk, chunk, *x.shape[1:]), 3, 2) for x in tokens]
        prepared = delta_rule.prepare(*cut)

        def one(pages: jax.Array, tile: Any) -> tuple[jax.Array, jax.Array]:
            (source, target), fresh, chunks = tile
            state, read = _begin(pages[source], fresh), []
            for i in range(size // chunk):
                state, part = delta_rule.advance(state, jax.tree.map(lambda x, i=i: x[i], chunks))
                read.append(part)
            return lax.dynamic_update_index_in_dim(pages, state, target, 0), jnp.stack(read)

        # [tiles, chunks, heads, chunk, value_dim]
        pages, read = lax.scan(one, pages, (*self._tiles, prepared))
        return jnp.moveaxis(read, 2, 3).reshape(tiles * size, *read.shape[2:3], read.shape[-1]), pages


def _one(pages: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
    """A row: the pages, and its output."""
    (source, target), fresh, tokens = row
    state, read = delta_rule.step(_begin(pages[source], fresh), *tokens)
    return lax.dynamic_update_index_in_dim(pages, state, target, 0), read


def _several(pages: jax.Array, rows: Any) -> tuple[jax.Array, jax.Array]:
    """Rows of different sequences."""
    (sources, targets), fresh, tokens = rows
    states, read = delta_rule.step(_begin(pages[sources], fresh), *tokens)
    return pages.at[targets].set(states), read


def _following(
    carry: tuple[jax.Array, delta_rule.Earlier], rows: Any
) -> tuple[tuple[jax.Array, delta_rule.Earlier], jax.Array]:
    """Rows, several of which may be of one sequence; with those before them."""
    (pages, earlier), ((sources, targets), fresh, tokens, behind) = carry, rows
    q, k, v, decay, *rate = tokens
    states = _begin(pages[sources], fresh)
    states, read, earlier = delta_rule.steps(
        states, q, k, v, decay, rate[0] if rate else None, behind, earlier
    )
    return (pages.at[targets].set(states), earlier), read


def _convolve_in_order(
    tiles: jax.Array,
    weight: jax.Array,
    pages: jax.Array,
    states: tuple[jax.Array, jax.Array],
    fresh: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """tiles [tiles, size, channels], of which `lengths` tokens are real -> [tiles * size, channels]."""
    _, size, channels = tiles.shape

    def one(pages: jax.Array, tile: Any) -> tuple[jax.Array, jax.Array]:
        (source, target), fresh, length, inputs = tile
        before = lax.optimization_barrier(_begin(pages[source], fresh))  # else as in _convolve_rows
        after = lax.dynamic_slice_in_dim(jnp.concatenate([before, inputs]), length, before.shape[0])
        return lax.dynamic_update_index_in_dim(pages, after, target, 0), before

    pages, before = lax.scan(one, pages, (states, fresh, lengths, tiles))
    every = jnp.concatenate([before, tiles], axis=1)
    return _weighted(every, weight, size).reshape(-1, channels), pages


def _behind(slots: jax.Array, limit: int) -> jax.Array:
    """[rows]: number of rows of the same sequence before each. Padding has none."""
    count, same = jnp.zeros_like(slots), slots > 0
    for back in range(1, limit + 1):
        same &= jnp.pad(slots, (back, 0))[: len(slots)] == slots
        count += same
    return count


def _begin(states: jax.Array, fresh: jax.Array) -> jax.Array:
    """Replaces states by zeros where a sequence begins."""
    return jnp.where(fresh.reshape(*fresh.shape, *[1] * (states.ndim - fresh.ndim)), 0, states)


def _weighted(every: jax.Array, weight: jax.Array, tokens: int) -> jax.Array:
    """Weighted sums of each token and those before it, by weight [channels, taps].

    every [n, taps - 1 + tokens, channels] -> [n, tokens, channels].
    """
    return sum(
        (every[:, i : i + tokens] * weight[:, i] for i in range(1, weight.shape[1])),
        every[:, :tokens] * weight[:, 0],
    )
