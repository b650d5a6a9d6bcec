"""A draft model or head on the device. Its layers have places of their own in the cache, behind the model's,
and keep a token on the page that the model's first cache group has for it.

Each trunk also runs it over its batch, for its keys and values. So it knows every token that the model knows,
wherever that was computed. A head keeps those of a token that follow from the token and the model's state
before it; so a page's never depend on tokens behind the page, and pages are shared as without a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jengine.execution.attention import TokenAxis
from jengine.execution.batch import ENTRY_WORDS, RESET_WORDS, Batch, batch_shapes
from jengine.execution.kv_cache import SHARED, Cache
from jengine.execution.sampler import Sampled, make_proposer
from jengine.execution.slots import KeptStates, SlotState, updated
from jengine.execution.spec import ExecutionSpec
from jengine.execution.trunk import make_pass, to_sample
from jengine.models import Model, Params
from jengine.models.cache import places
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import DraftKey, TrunkKey, pages_of

ROW_WORDS = 2  # slot, number of drafts

# the cache's part, SlotState.last, and what a head's next step reads
State = tuple[Cache, jax.Array, jax.Array | None]
DraftOut = tuple[Cache, SlotState, Sampled]  # the last is int32 [rows, tokens]


def make_follow(spec: ExecutionSpec, key: TrunkKey) -> Callable[..., tuple[Cache, SlotState]]:
    """(the draft model's or head's params, cache, slots, batch, states that a head reads) -> (cache with its
    keys and values of the batch, slots with what a head reads later).
    """
    draft, run, first = _make_pass(spec, key)

    def follow(
        params: Params, cache: Cache, slots: SlotState, batch: Batch, states: Sequence[jax.Array]
    ) -> tuple[Cache, SlotState]:
        before = []
        if (head := draft.head(params)) is not None and (saved := slots.kept) is not None:
            axis, entering = TokenAxis(slots.last, batch, slots.drafts), head.entering(states)
            before = [states_before(axis, batch, entering, saved)]
            slots = slots._replace(kept=noted(axis, batch, entering, saved))
        draft_cache, _, _ = run(params, _own(cache, first), _of_first_group(slots), batch, *before)
        return _joined(cache, first, draft_cache), slots

    return follow


def _make_pass(
    spec: ExecutionSpec, key: TrunkKey
) -> tuple[Model, Callable[..., tuple[Cache, TokenAxis, Any]], int]:
    """The draft model or head; a pass whose result is a pair: hidden states, and for a head those that its
    next step reads; and the index of its first place in the shared pool.
    """
    assert spec.drafting is not None and spec.draft is not None
    draft, first = spec.draft, len(places(spec.groups, SHARED))
    if draft.reads is None:
        run = make_pass(spec.drafting, key, lambda module, *args: (module.hidden(*args), None))
    else:
        run = make_pass(spec.drafting, key, lambda head, *args: head.ahead(*args))
    return draft, run, first


def make_draft(spec: ExecutionSpec, key: DraftKey) -> Callable[..., DraftOut]:
    """The function to compile: (the draft model's or head's params, cache, slots, packed, see `pack_drafts`)
    -> (cache, slots, drafts).

    A row takes part in as many steps as it wants drafts, each from the token before it; the first step begins
    with its slot's last token, and for a head with the model's state before that. The loop has a fixed
    length, so it needs no host. Drafts are the likeliest tokens.
    """
    rows = key.rows
    draft, run, first = _make_pass(spec, TrunkKey(rows, 0, key.pages))
    choose = make_proposer(draft)
    empty = empty_batch(rows)

    def propose(params: Params, cache: Cache, slots: SlotState, packed: jax.Array) -> DraftOut:
        own_slots, counts = packed[: rows * ROW_WORDS].reshape(rows, ROW_WORDS).T
        entries = packed[rows * ROW_WORDS :].reshape(-1, ENTRY_WORDS)
        slots = updated(slots, entries, jnp.zeros((0, RESET_WORDS), jnp.int32))
        of_draft = _of_first_group(slots)
        before = None if slots.kept is None else read(slots.kept, own_slots, slots.last[own_slots, 1])

        def step(state: State, number: jax.Array) -> tuple[State, jax.Array]:
            kv, last, before = state
            at = jnp.where(number < counts, own_slots, 0)
            now = empty._replace(row_slots=at, row_tokens=jnp.where(at > 0, -1, 0), sample_slots=at)
            states = [] if before is None else [before]
            kv, axis, (hidden, following) = run(params, kv, of_draft._replace(last=last), now, *states)
            last, tokens = choose(params, last, to_sample(now, axis, hidden))
            return (kv, last, following), tokens

        steps = jnp.arange(key.tokens, dtype=jnp.int32)
        (kv, _, _), tokens_by_step = lax.scan(step, (_own(cache, first), slots.last, before), steps)
        drafts = tokens_by_step.T
        assert slots.drafts is not None
        slots = slots._replace(drafts=slots.drafts.at[own_slots].set(drafts))
        return _joined(cache, first, kv), slots, Sampled(drafts)

    return propose


def pack_drafts(key: DraftKey, page_size: int, plan: StepPlan) -> np.ndarray:
    """int32 [draft_words]: rows, then the block table entries of their slots in the first group."""
    buffer = np.zeros(draft_words(key, page_size), np.int32)
    spans = plan.drafting
    rows = [[span.slot, span.guesses] for span in spans]
    buffer[: len(rows) * ROW_WORDS] = np.array(rows, np.int32).reshape(-1)
    slots = {span.slot for span in spans}
    entries = [entry for entry in plan.table if entry[0] == 0 and entry[1] in slots]
    packed = np.array(entries, np.int32).reshape(-1)
    buffer[key.rows * ROW_WORDS :][: packed.size] = packed
    return buffer


def draft_words(key: DraftKey, page_size: int) -> int:
    """Size of a buffer: rows, and the pages that each of them may enter."""
    pages = pages_of(key.tokens, page_size) + 1
    return key.rows * (ROW_WORDS + pages * ENTRY_WORDS)


def empty_batch(rows: int) -> Batch:
    """A batch of padding rows."""
    zeros: Any = [np.zeros(shape, np.int32) for shape in batch_shapes(rows, 0, 1, rows, 0)]
    return Batch(*zeros)._replace(sample_tokens=np.arange(rows, dtype=np.int32))  # type: ignore[arg-type]


def _own(cache: Cache, first: int) -> Cache:
    """The draft model's part of the cache."""
    return [cache[SHARED][first:]]


def _joined(cache: Cache, first: int, draft_cache: Cache) -> Cache:
    return [[*cache[SHARED][:first], *draft_cache[SHARED]], *cache[SHARED + 1 :]]


def _of_first_group(slots: SlotState) -> SlotState:
    """The slots as the draft model reads them."""
    return slots._replace(block_table=slots.block_table[:1])


def states_before(axis: TokenAxis, batch: Batch, states: jax.Array, saved: KeptStates) -> jax.Array:
    """The state at the token before each of the axis, [N, size]; zeros where it is not known. states: at the
    tokens of the axis, [N, size].
    """
    rows, (tiles, length) = batch.row_slots.shape[0], batch.tile_tokens.shape
    real, owner, positions = axis.real, axis.owner, axis.positions
    neighbours = real & jnp.roll(real, 1) & (owner == jnp.roll(owner, 1))
    neighbours &= positions == jnp.roll(positions, 1) + 1
    before = jnp.where(neighbours[:, None], jnp.roll(states, 1, axis=0), 0)

    def first(at: slice) -> jax.Array:
        known = read(saved, owner[at], positions[at])
        return jnp.where(neighbours[at, None], before[at], known)

    of_rows = first(slice(0, rows))
    if not tiles:
        return of_rows
    by_tile = before[rows:].reshape(tiles, length, -1)
    by_tile = jnp.concatenate([first(slice(rows, None, length))[:, None], by_tile[:, 1:]], axis=1)
    return jnp.concatenate([of_rows, by_tile.reshape(tiles * length, -1)])


def read(saved: KeptStates, slots: jax.Array, positions: jax.Array) -> jax.Array:
    """States before the tokens at int32 [n] positions of slots -> [n, size]; zeros where not known."""
    place = (positions - 1) % saved.followers.shape[1]
    known = (positions > 0) & (saved.followers[slots, place] == positions)
    return jnp.where(known[:, None], saved.states[slots, place], 0)


def noted(axis: TokenAxis, batch: Batch, states: jax.Array, saved: KeptStates) -> KeptStates:
    """With the states of the last rows of each slot, and of the last token of its last tile."""
    rows, (tiles, length) = batch.row_slots.shape[0], batch.tile_tokens.shape
    count = saved.followers.shape[1]
    ends = rows + length * jnp.arange(tiles) + jnp.maximum(batch.tile_lengths - 1, 0)
    at = jnp.concatenate([jnp.arange(rows), ends])
    # a later token of the slot has the same place
    later = jnp.concatenate([_again(batch.row_slots, count), _again(batch.tile_slots, 1)])
    slots = jnp.where(axis.real[at] & ~later, axis.owner[at], 0)
    positions = axis.positions[at]
    place = positions % count
    return KeptStates(
        saved.states.at[slots, place].set(states[at]), saved.followers.at[slots, place].set(positions + 1)
    )


def _again(slots: jax.Array, behind: int) -> jax.Array:
    """Whether an entry is followed by one of the same slot, so many entries behind it; bool [n]."""
    padded = jnp.pad(slots, (0, behind))
    return padded[behind : behind + slots.shape[0]] == slots
