"""The compiled trunk: embed, layers, final hidden states; gives models their `attend`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.execution.batch import Batch, BatchLayout
from jengine.execution.kv_cache import Cache
from jengine.execution.slots import SlotState
from jengine.models import Model, Params
from jengine.program_table import ProgramTable, TrunkKey
from pallas_kernels import dispatch
from pallas_kernels.quantized import Pages
from pallas_kernels.xla import Rotation, rotate


class ToSample(NamedTuple):
    """What a trunk hands to its sampler, in sampler rows: decode rows, then tiles, then padding."""

    hidden: jax.Array  # [rows, hidden_size]
    slots: jax.Array  # int32 [rows]; 0 where nothing is sampled
    positions: jax.Array  # int32 [rows], of the token to be sampled


TrunkOut = tuple[Cache, SlotState, ToSample, jax.Array]  # the last: [tiles * tile_size, hidden_size], for prompt_logprobs


def make_trunk(model: Model, key: TrunkKey, table: ProgramTable, page_size: int, device: jax.Device) -> Callable[..., TrunkOut]:
    """The function to compile: (params, cache, slots, packed batch) -> (cache, slots, what to sample, the tiles' hidden states).

    Args:
        device: that it is compiled for, or one of them; kernels are chosen by it.
    """
    layout = BatchLayout.of(key, tile_size=table.tile_size, page_size=page_size)
    sample_rows = table.sample_rows(key)

    def trunk(params: Params, cache: Cache, slots: SlotState, packed: jax.Array) -> TrunkOut:
        batch = layout.unpack(packed)
        slots = _updated(slots, batch)
        tokens, positions, pages = _token_axis(slots, batch, page_size)
        cache = list(cache)
        attend = _make_attend(cache, slots, batch, key, positions, pages, page_size, device)
        hidden = model.bind(params).hidden(tokens, positions, attend)
        return cache, slots, _to_sample(hidden, batch, sample_rows), hidden[key.rows :]

    return trunk


def _updated(slots: SlotState, batch: Batch) -> SlotState:
    """Apply a step's deltas."""
    slot, index, page = batch.page_updates.T
    table = slots.block_table.at[slot, index].set(page)
    sampling = slots.sampling
    if batch.resets.shape[0]:
        sampling = sampling.at[batch.resets[:, 0]].set(batch.resets[:, 1:])
    return slots._replace(block_table=table, sampling=sampling)


def _token_axis(slots: SlotState, batch: Batch, page_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Token ids, positions and pages to write, each [rows + tiles * tile_size]; padding writes the null page."""
    tiles, tile_size = batch.tile_tokens.shape
    within = jnp.arange(tile_size)
    tile_positions = batch.tile_positions[:, None] + within
    tokens = jnp.concatenate([slots.last_token[batch.row_slots], batch.tile_tokens.reshape(-1)])
    positions = jnp.concatenate([batch.row_positions, tile_positions.reshape(-1)])
    owner = jnp.concatenate([batch.row_slots, jnp.repeat(batch.tile_slots, tile_size, total_repeat_length=tiles * tile_size)])
    real = jnp.concatenate([batch.row_slots > 0, (within < batch.tile_lengths[:, None]).reshape(-1)])
    index = jnp.minimum(positions // page_size, slots.block_table.shape[1] - 1)
    return tokens, positions, jnp.where(real, slots.block_table[owner, index], 0)


def _make_attend(
    cache: Cache,
    slots: SlotState,
    batch: Batch,
    key: TrunkKey,
    positions: jax.Array,
    pages: jax.Array,
    page_size: int,
    device: jax.Device,
) -> Callable[..., jax.Array]:
    """The closure a model calls once a layer: rotates, writes the cache, splits rows from tiles, attends."""
    row_tables, tile_tables = slots.block_table[batch.row_slots], slots.block_table[batch.tile_slots]
    row_lengths = jnp.where(batch.row_slots > 0, batch.row_positions + 1, 0)
    offsets = positions % page_size

    @partial(jax.jit, static_argnames=("scale", "window", "soft_cap"))  # traced and lowered once for all layers that are alike
    def one_layer(
        q: jax.Array, k: jax.Array, v: jax.Array, kv: tuple[Pages, Pages], rotation: Rotation | None, **options: Any
    ) -> tuple[jax.Array, tuple[Pages, Pages]]:
        q = q if rotation is None else rotate(q, rotation)
        kv = dispatch.kv_write(*kv, k, v, pages, offsets, rotation=rotation, device=device)
        how = {**options, "pages": key.pages, "device": device}
        out = [dispatch.paged_attention_decode(q[: key.rows], *kv, row_tables, row_lengths, **how)]
        if key.tiles:
            tiles = q[key.rows :].reshape(key.tiles, -1, *q.shape[1:])
            got = dispatch.paged_attention_prefill(tiles, *kv, tile_tables, batch.tile_positions, batch.tile_lengths, **how)
            out.append(got.reshape(-1, *q.shape[1:]))
        return jnp.concatenate(out), kv

    def attend(
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        rotation: Rotation | None,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> jax.Array:
        out: jax.Array
        out, cache[layer] = one_layer(q, k, v, cache[layer], rotation, scale=scale, window=window, soft_cap=soft_cap)
        return out

    return attend


def _to_sample(hidden: jax.Array, batch: Batch, sample_rows: int) -> ToSample:
    """Every decode row, and of each tile its last real token."""
    rows, (tiles, tile_size) = batch.row_slots.shape[0], batch.tile_tokens.shape
    last = rows + jnp.arange(tiles) * tile_size + jnp.maximum(batch.tile_lengths - 1, 0)
    padding = jnp.zeros(sample_rows - rows - tiles, jnp.int32)
    at = jnp.concatenate([jnp.arange(rows), last, padding])
    slots = jnp.concatenate([batch.row_slots, jnp.where(batch.tile_samples > 0, batch.tile_slots, 0), padding])
    positions = jnp.concatenate([batch.row_positions + 1, batch.tile_positions + batch.tile_lengths, padding])
    return ToSample(hidden[at], slots, positions)
