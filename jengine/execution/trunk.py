"""The compiled trunk: embedding, layers, final hidden states. Provides models with their `attend`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jengine.execution.attention import PagedAttention, TokenAxis
from jengine.execution.batch import Batch, BatchLayout
from jengine.execution.images import Visual, visual
from jengine.execution.kv_cache import Cache, Place
from jengine.execution.loras import Stacks
from jengine.execution.recurrence import Recurrence
from jengine.execution.slots import SlotState, updated
from jengine.execution.spec import ExecutionSpec
from jengine.models import Params
from jengine.models.cache import CacheGroup, homes, paged
from jengine.table.program_table import MOST_STATES, TrunkKey
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.qkv import Qkv, QkvProduct, QueriesOnly
from pallas_kernels.elementwise.rotary import Rotation

Adapt = Callable[[Params, Stacks, jax.Array], Params]  # params, stacks, sampling words of each token's slot


class ToSample(NamedTuple):
    """A trunk's output for its sampler, in sampler rows: a plan's samples, then padding."""

    hidden: jax.Array  # [rows, hidden_size]
    slots: jax.Array  # int32 [rows]; 0 if nothing is sampled
    positions: jax.Array  # int32 [rows], of the token to be sampled
    tokens: jax.Array  # int32 [rows], the token before it


def make_trunk(
    spec: ExecutionSpec,
    layout: BatchLayout,
    *,
    follow: Callable[..., tuple[Cache, SlotState]] | None = None,
    adapt: Adapt | None = None,
) -> Callable[..., Any]:
    """The function to compile: (params, stacked adapters, cache, slots, packed batch, pool of embeddings if
    there are images, hidden states from the stage before if there is one) -> (cache, slots, ToSample, hidden
    states of tiles); of a stage that is not the last: (cache, slots, hidden states). What there is not is ().

    The hidden states of tiles are [passed tiles * tile_size, hidden_size].

    Args:
        follow: makes the keys and values of the draft model or head, see draft.py; params is then a pair.
        adapt: for a trunk with adapters.
    """
    key, stage = layout.key, spec.stage
    passed = spec.table.passed_tiles(key.tiles) * spec.table.tile_size
    reads = None if spec.draft is None else spec.draft.reads  # states that a head reads; None: there is none

    def compute(
        module: Any, tokens: jax.Array, positions: jax.Array, attend: LayerCaches, *entering: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        if spec.model.stage is not None:
            x = module.enter(tokens, positions, attend) if stage.first else entering[0]
            x = module.through(x, positions, attend, stage.layers)
            return module.leave(x) if stage.last else x, []
        if reads:
            out: tuple[jax.Array, list[jax.Array]] = module.hidden_and_states(
                tokens, positions, attend, reads
            )
            return out
        hidden = module.hidden(tokens, positions, attend)
        return hidden, [] if reads is None else [hidden]

    invariant, following = spec.table.batch_invariant, MOST_STATES if spec.draft_states else 0
    run = make_pass(spec, key, compute, adapt=adapt, batch_invariant=invariant, following=following)

    def trunk(
        params: Params,
        stacks: Stacks,
        cache: Cache,
        slots: SlotState,
        packed: jax.Array,
        pool: Sequence[jax.Array] = (),
        entering: Sequence[jax.Array] = (),
    ) -> Any:
        batch, of_draft = layout.unpack(packed), None
        slots = updated(slots, batch.table, batch.resets)
        if follow is not None:
            params, of_draft = params
        cache, axis, (hidden, states) = run(params, cache, slots, batch, *entering, stacks=stacks, pool=pool)
        if follow is not None:
            # a head must not change how XLA rounds what the sampler reads
            cache, slots = follow(of_draft, cache, slots, batch, lax.optimization_barrier(states))
        if not stage.last:
            return cache, slots, hidden
        return cache, slots, to_sample(batch, axis, hidden), of_tiles(hidden, key, passed)

    return trunk


def to_sample(batch: Batch, axis: TokenAxis, hidden: jax.Array) -> ToSample:
    """What the sampler reads of a pass."""
    at = batch.sample_tokens
    return ToSample(hidden[at], batch.sample_slots, axis.positions[at] + 1, axis.tokens[at])


def of_tiles(hidden: jax.Array, key: TrunkKey, passed: int) -> jax.Array:
    """The hidden states of a pass's tiles, with zeros up to this many tokens."""
    tiles = hidden[key.rows :]
    return jnp.pad(tiles, ((0, passed - len(tiles)), (0, 0))) if passed > len(tiles) else tiles


def _hidden(module: Any, *args: Any) -> Any:
    return module.hidden(*args)


def make_pass(
    spec: ExecutionSpec,
    key: TrunkKey,
    compute: Callable[..., Any] = _hidden,
    *,
    adapt: Adapt | None = None,
    batch_invariant: bool = False,
    following: int = 0,
) -> Callable[..., tuple[Cache, TokenAxis, Any]]:
    """(params, cache, slots, batch, ..., stacks=, pool=) -> (cache, the token axis, what `compute` returns).
    The slots already include the batch's updates. Only `adapt` uses the stacks. `pool`: that of embeddings,
    if there is one.

    Args:
        compute: takes the model's module, tokens, positions, `attend`, and what follows the batch.
        batch_invariant: see `PagedAttention`.
        following: see `Recurrence`.
    """
    model, page_size, device = spec.model, spec.page_size, spec.mesh.devices.flat[0]
    groups = model.groups

    def run(
        params: Params,
        cache: Cache,
        slots: SlotState,
        batch: Batch,
        *more: Any,
        stacks: Stacks = (),
        pool: Sequence[jax.Array] = (),
    ) -> tuple[Cache, TokenAxis, Any]:
        axis, seen = TokenAxis(slots.last, batch, slots.drafts), None
        for rows in pool:
            seen = visual(axis.tokens, rows, model.config.vocab_size)
            axis.tokens = jnp.where(seen.here, 0, axis.tokens)
        if adapt is not None:
            params = adapt(params, stacks, slots.sampling[axis.owner])
        cache = [list(pool) for pool in cache]
        tables = zip(paged(groups), slots.block_table, strict=True)
        attentions = [
            PagedAttention(group, table, batch, axis, key, page_size, device, batch_invariant)
            for group, table in tables
        ]
        recurrence = None
        if any(group.kind == "state" for group in groups):
            on_cpu = device.platform == "cpu"
            recurrence = Recurrence(batch, axis, key, following=following, in_order=on_cpu)
        attend = LayerCaches(cache, groups, attentions, recurrence, seen)
        out = compute(model.bind(params), axis.tokens, axis.rotary, attend, *more)
        return cache, axis, out

    return run


class LayerCaches:
    """The cache as layers use it: each call uses its group's attention and replaces the layer's arrays."""

    def __init__(
        self,
        cache: Cache,
        groups: tuple[CacheGroup, ...],
        attentions: list[PagedAttention],
        recurrence: Recurrence | None,
        visual: Visual | None = None,
    ) -> None:
        self.visual = visual
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
        pool = self._pool_of(layer)
        out: jax.Array
        out, pool[place] = self._attentions[group].attend(qkv, pool[place], rotation, options, part)
        return out

    def _pool_of(self, layer: int) -> list[Place]:
        return self._cache[self._groups[self._home[layer][0]].pool]

    def convolve(self, layer: int, x: jax.Array, weight: jax.Array) -> jax.Array:
        assert self._recurrence is not None
        pool, (_, place, _) = self._pool_of(layer), self._home[layer]
        before, *states = pool[place]
        out: jax.Array
        out, before = self._recurrence.convolve(x, weight, before)
        pool[place] = before, *states
        return out

    def recur(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, rate: jax.Array | None
    ) -> jax.Array:
        assert self._recurrence is not None
        pool, (_, place, _) = self._pool_of(layer), self._home[layer]
        *before, states = pool[place]
        out: jax.Array
        out, states = self._recurrence.recur(q, k, v, decay, rate, states)
        pool[place] = *before, states
        return out
