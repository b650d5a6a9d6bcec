"""Recurrent layers as models call them. Each row and tile reads one page of states and writes another or the
same.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jengine.execution.attention import TokenAxis
from jengine.execution.batch import Batch
from jengine.table.program_table import MOST_STATES, TrunkKey
from pallas_kernels import delta_rule

ROWS_BYTES = 32 << 20  # bytes of states processed at once, which limits what rows need beside the cache


class Recurrence:
    """States by page: the convolution's [pages, taps - 1, channels], and the recurrence's [pages, heads,
    key_dim, value_dim]. A model may have only one of them.

    Rows come first, then tiles in order. Each tile reads what earlier ones wrote. So several tiles of a
    sequence fit in one step, and a prompt may start from a state that another prompt writes in the same step.
    All rows of a sequence read the same page, that before its first row, and follow each other within
    MOST_STATES rows; the last of them alone may write to this page. Padding reads zeros and writes to the null
    page.
    """

    def __init__(self, batch: Batch, axis: TokenAxis, key: TrunkKey) -> None:
        rows, tiles = (batch.row_states, batch.row_slots == 0), (batch.tile_states, batch.tile_positions == 0)
        self._rows, self._tiles = (((states[:, 0], states[:, 1]), fresh) for states, fresh in (rows, tiles))
        self._lengths, self._real, self._key = batch.tile_lengths, axis.real, key
        self._most = min(max(key.rows - 1, 0), MOST_STATES)
        self._behind = _behind(batch.row_slots, self._most)
        # traced and lowered once for all layers with the same arguments
        self.convolve = jax.jit(self._convolve)
        self.recur = jax.jit(self._recur)

    def _convolve(self, x: jax.Array, weight: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [N, channels], weight [channels, taps] -> float32 [N, channels], and the pages."""
        key, taps, out = self._key, weight.shape[1], []
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
        if key.rows:
            (sources, targets), fresh = self._rows
            # of the page, the inputs that no row of the sequence has pushed out
            left = jnp.arange(taps - 1) + self._behind[:, None]
            before = _begin(pages[sources[:, None], jnp.minimum(left, taps - 2)], fresh)
            if key.tiles:  # else XLA may read again after the update, from a copy of all pages
                before = lax.optimization_barrier(before)
            rows = jnp.pad(x[: key.rows], [(taps - 1, 0), (0, 0)])
            others = jnp.stack([rows[i : i + key.rows] for i in range(taps - 1)], axis=1)
            before = jnp.where((left < taps - 1)[..., None], before, others)
            every = jnp.concatenate([before, x[: key.rows, None]], axis=1)
            pages = pages.at[targets].set(every[:, 1:])
            out.append(_weighted(every, weight, 1)[:, 0])
        if key.tiles:
            (sources, targets), fresh = self._tiles
            tiles = x[key.rows :].reshape(key.tiles, -1, x.shape[1])

            def one(pages: jax.Array, tile: Any) -> tuple[jax.Array, jax.Array]:
                source, target, fresh, length, own = tile
                before = _begin(pages[source], fresh)
                after = lax.dynamic_slice_in_dim(jnp.concatenate([before, own]), length, taps - 1)
                return lax.dynamic_update_index_in_dim(pages, after, target, 0), before

            pages, before = lax.scan(one, pages, (sources, targets, fresh, self._lengths, tiles))
            out.append(
                _weighted(jnp.concatenate([before, tiles], axis=1), weight, tiles.shape[1]).reshape(
                    -1, x.shape[1]
                )
            )
        return jnp.concatenate(out), pages

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
            read, pages = self._recur_rows([x[: key.rows] for x in tokens], pages)
            out.append(read)
        if key.tiles:
            real = self._real[key.rows :]
            # padding must not change a state
            tokens = [jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x[key.rows :], 0) for x in tokens]
            read, pages = self._recur_tiles(tokens, pages)
            out.append(read)
        return jnp.concatenate(out), pages

    def _recur_rows(self, tokens: list[jax.Array], pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Processes some rows at a time, to bound the memory of their states."""
        q, k, v, decay, *rates = tokens
        rate = rates[0] if rates else None

        def some(carry: Any, rows: Any) -> tuple[Any, jax.Array]:
            (pages, earlier), ((sources, targets), fresh, behind, tokens) = carry, rows
            states = _begin(pages[sources], fresh)
            states, read, earlier = delta_rule.steps(states, *tokens, behind, earlier)
            return (pages.at[targets].set(states), earlier), read

        rows, at_once = self._key.rows, max(ROWS_BYTES // (4 * math.prod(pages.shape[1:])), 1)
        parts = next(parts for parts in range(1, rows + 1) if rows % parts == 0 and rows // parts <= at_once)
        carry = pages, delta_rule.Earlier.none(self._most, k, v)
        whole = *self._rows, self._behind, (q, k, v, decay, rate)
        if parts == 1:
            (pages, _), read = some(carry, whole)
            return read, pages
        (pages, _), read = lax.scan(
            some, carry, jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), whole)
        )
        return read.reshape(rows, *read.shape[2:]), pages

    def _recur_tiles(self, tokens: list[jax.Array], pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the parts that do not depend on the state for all tiles at once, then the states tile by
        tile.
        """
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


def _behind(slots: jax.Array, most: int) -> jax.Array:
    """[rows]: number of rows of the same sequence before each. Padding has none."""
    count, same = jnp.zeros_like(slots), slots > 0
    for back in range(1, most + 1):
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
