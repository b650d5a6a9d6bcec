"""The compiled trunk: embedding, layers, final hidden states. Provides models with their `attend`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from jengine.core.config import AttentionBackend
from jengine.execution.adapters import Stacks
from jengine.execution.attention import PagedAttention, TokenAxis
from jengine.execution.batch import Batch, BatchLayout
from jengine.execution.kv_cache import Cache
from jengine.execution.recurrence import Recurrence
from jengine.execution.slots import SlotState, updated
from jengine.models import Model, Params
from jengine.models.cache import CacheGroup, homes, paged
from jengine.table.program_table import TrunkKey
from pallas_kernels.options import AttentionOptions
from pallas_kernels.qkv import Qkv, QkvProduct, QueriesOnly
from pallas_kernels.xla import Rotation


class ToSample(NamedTuple):
    """A trunk's output for its sampler, in sampler rows: a plan's samples, then padding."""

    hidden: jax.Array  # [rows, hidden_size]
    slots: jax.Array  # int32 [rows]; 0 if nothing is sampled
    positions: jax.Array  # int32 [rows], of the token to be sampled
    tokens: jax.Array  # int32 [rows], the token before it


Adapt = Callable[[Params, Stacks, SlotState, jax.Array], Params]  # params, stacks, slots, tokens' slots
# the last is [tiles * tile_size, hidden_size], for prompt_logprobs
TrunkOut = tuple[Cache, SlotState, ToSample, jax.Array]


def make_trunk(
    model: Model,
    layout: BatchLayout,
    page_size: int,
    device: jax.Device,
    backend: AttentionBackend = "auto",
    *,
    batch_invariant: bool = False,
    following: int = 0,
    follow: Callable[..., Cache] | None = None,
    adapt: Adapt | None = None,
) -> Callable[..., TrunkOut]:
    """The function to compile: (params, cache, slots, packed batch) -> (cache, slots, ToSample, hidden states
    of tiles).

    Args:
        adapt: for a trunk with adapters, whose second argument is their stacks.
        follow: makes the draft model's keys and values, see draft.py; params is then a pair.
        device: a device that it is compiled for; it determines the kernels.
        backend: implementation of decode attention, see `EngineConfig`.
        batch_invariant: see `PagedAttention`.
        following: see `Recurrence`.
    """
    how: Any = {"batch_invariant": batch_invariant, "following": following}
    run = make_pass(model, layout.key, page_size, device, backend, adapt, **how)

    def trunk(params: Params, stacks: Stacks, cache: Cache, slots: SlotState, packed: jax.Array) -> TrunkOut:
        batch = layout.unpack(packed)
        slots = updated(slots, batch.table, batch.resets)
        if follow is None:
            cache, to_sample, tiles = run(params, cache, slots, batch, stacks)
        else:
            params, of_draft = params
            cache, to_sample, tiles = run(params, cache, slots, batch, stacks)
            cache = follow(of_draft, cache, slots, batch)
        return cache, slots, to_sample, tiles

    return trunk if adapt is not None else partial(without_adapters, trunk)


def without_adapters(function: Callable[..., Any], params: Params, *others: Any) -> Any:
    """Calls a function whose second argument is stacks with none."""
    return function(params, (), *others)


def make_pass(
    model: Model,
    key: TrunkKey,
    page_size: int,
    device: jax.Device,
    backend: AttentionBackend = "auto",
    adapt: Adapt | None = None,
    *,
    batch_invariant: bool = False,
    following: int = 0,
) -> Callable[..., tuple[Cache, ToSample, jax.Array]]:
    """(params, cache, slots, batch, stacks) -> (cache, ToSample, hidden states of tiles). The slots already
    include the batch's updates. Only `adapt` uses the stacks.
    """
    groups = model.groups

    def run(
        params: Params, cache: Cache, slots: SlotState, batch: Batch, stacks: Stacks = ()
    ) -> tuple[Cache, ToSample, jax.Array]:
        axis = TokenAxis(slots.last, batch, slots.drafts)
        if adapt is not None:
            params = adapt(params, stacks, slots, axis.owner)
        cache = [list(pool) for pool in cache]
        tables = zip(paged(groups), slots.block_table, strict=True)
        attentions = [
            PagedAttention(group, table, batch, axis, key, page_size, device, backend, batch_invariant)
            for group, table in tables
        ]
        recurrence = None
        if any(group.kind == "state" for group in groups):
            on_cpu = device.platform == "cpu"
            recurrence = Recurrence(batch, axis, key, following=following, in_order=on_cpu)
        hidden = model.bind(params).hidden(
            axis.tokens, axis.positions, LayerCaches(cache, groups, attentions, recurrence)
        )
        at = batch.sample_tokens
        to_sample = ToSample(hidden[at], batch.sample_slots, axis.positions[at] + 1, axis.tokens[at])
        return cache, to_sample, hidden[key.rows :]

    return run


class LayerCaches:
    """The cache as layers use it: each call uses the attention of the layer's group and replaces the layer's
    arrays.
    """

    def __init__(
        self,
        cache: Cache,
        groups: tuple[CacheGroup, ...],
        attentions: list[PagedAttention],
        recurrence: Recurrence | None,
    ) -> None:
        self._cache, self._groups, self._home = cache, groups, homes(groups)
        self._attentions, self._recurrence = attentions, recurrence

    def __call__(
        self,
        layer: int,
        qkv: Qkv | QkvProduct | QueriesOnly,
        rotation: Rotation | None,
        options: AttentionOptions,
    ) -> jax.Array:
        group, place, part = self._home[layer]
        pool = self._cache[self._groups[group].pool]
        out: jax.Array
        out, pool[place] = self._attentions[group].attend(qkv, pool[place], rotation, options, part)
        return out

    def convolve(self, layer: int, x: jax.Array, weight: jax.Array) -> jax.Array:
        assert self._recurrence is not None
        group, place, _ = self._home[layer]
        pool = self._cache[self._groups[group].pool]
        before, *states = pool[place]
        out: jax.Array
        out, before = self._recurrence.convolve(x, weight, before)
        pool[place] = before, *states
        return out

    def recur(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, rate: jax.Array | None
    ) -> jax.Array:
        assert self._recurrence is not None
        group, place, _ = self._home[layer]
        pool = self._cache[self._groups[group].pool]
        *before, states = pool[place]
        out: jax.Array
        out, states = self._recurrence.recur(q, k, v, decay, rate, states)
        pool[place] = *before, states
        return out
