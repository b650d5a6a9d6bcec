"""A draft model on the device. Its layers have places of their own in the cache, behind the model's, and
keep a token on the page that the model's first cache group has for it.

Each trunk also runs the draft model over its batch, for its keys and values. So the draft model knows every
token that the model knows, wherever that was computed.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jengine.core.config import AttentionBackend
from jengine.execution.batch import ENTRY_WORDS, RESET_WORDS, Batch
from jengine.execution.kv_cache import SHARED, Cache
from jengine.execution.sampler import Sampled, make_sampler
from jengine.execution.slots import SlotState, updated
from jengine.execution.trunk import make_pass
from jengine.models import Model, Params
from jengine.models.cache import places
from jengine.scheduling.step_plan import StepPlan
from jengine.table.pages import pages_of
from jengine.table.program_table import DraftKey, TrunkKey

ROW_WORDS = 2  # slot, number of drafts

DraftOut = tuple[Cache, SlotState, Sampled]  # the last is int32 [rows, tokens]


def make_follow(
    model: Model, draft: Model, key: TrunkKey, page_size: int, device: jax.Device, backend: AttentionBackend
) -> Callable[[Params, Cache, SlotState, Batch], Cache]:
    """(the draft model's params, cache, slots, batch) -> cache with the draft model's keys and values of the
    batch.
    """
    run, first = make_pass(draft, key, page_size, device, backend), _first_place(model)

    def follow(params: Params, cache: Cache, slots: SlotState, batch: Batch) -> Cache:
        own, _, _ = run(params, _own(cache, first), _of_first_group(slots), batch)
        return _joined(cache, first, own)

    return follow


def make_draft(
    model: Model, draft: Model, key: DraftKey, page_size: int, device: jax.Device, backend: AttentionBackend
) -> Callable[..., DraftOut]:
    """The function to compile: (the draft model's params, cache, slots, packed, see `pack_drafts`) -> (cache,
    slots, drafts).

    A row takes part in as many steps as it wants drafts, each from the token before it; the first step begins
    with its slot's last token. The loop has a fixed length, so it needs no host. Drafts are what the draft
    model finds most likely.
    """
    rows, first = key.rows, _first_place(model)
    run = make_pass(draft, TrunkKey(rows, 0, key.pages), page_size, device, backend)
    sample = make_sampler(draft, "greedy")
    empty = _empty_batch(rows)

    def propose(params: Params, cache: Cache, slots: SlotState, packed: jax.Array) -> DraftOut:
        own_slots, counts = packed[: rows * ROW_WORDS].reshape(rows, ROW_WORDS).T
        entries = packed[rows * ROW_WORDS :].reshape(-1, ENTRY_WORDS)
        slots = updated(slots, entries, jnp.zeros((0, RESET_WORDS), jnp.int32))
        of_draft = _of_first_group(slots)

        def step(
            state: tuple[Cache, jax.Array], number: jax.Array
        ) -> tuple[tuple[Cache, jax.Array], jax.Array]:
            own, last = state
            at = jnp.where(number < counts, own_slots, 0)
            now = empty._replace(row_slots=at, row_tokens=jnp.where(at > 0, -1, 0), sample_slots=at)
            own, to_sample, _ = run(params, own, of_draft._replace(last=last), now)
            last, sampled = sample(params, last, slots.sampling, to_sample)
            return (own, last), sampled.tokens

        steps = jnp.arange(key.tokens, dtype=jnp.int32)
        (own, _), found = lax.scan(step, (_own(cache, first), slots.last), steps)
        drafts = found.T
        assert slots.drafts is not None
        slots = slots._replace(drafts=slots.drafts.at[own_slots].set(drafts))
        return _joined(cache, first, own), slots, Sampled(drafts)

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


def _empty_batch(rows: int) -> Batch:
    """A batch of padding rows."""

    def zeros(*shape: int) -> jax.Array:
        return np.zeros(shape, np.int32)  # type: ignore[return-value]

    return Batch(
        row_slots=zeros(rows),
        row_positions=zeros(rows),
        row_tokens=zeros(rows),
        row_states=zeros(0, 2),
        tile_slots=zeros(0),
        tile_positions=zeros(0),
        tile_lengths=zeros(0),
        tile_states=zeros(0, 2),
        tile_tokens=zeros(0, 1),
        sample_tokens=np.arange(rows, dtype=np.int32),  # type: ignore[arg-type]
        sample_slots=zeros(rows),
        table=zeros(0, ENTRY_WORDS),
        resets=zeros(0, RESET_WORDS),
    )


def _first_place(model: Model) -> int:
    """Index of the draft model's first place in the shared pool."""
    return len(places(model.groups, SHARED))


def _own(cache: Cache, first: int) -> Cache:
    """The draft model's part of the cache."""
    return [cache[SHARED][first:]]


def _joined(cache: Cache, first: int, own: Cache) -> Cache:
    return [[*cache[SHARED][:first], *own[SHARED]], *cache[SHARED + 1 :]]


def _of_first_group(slots: SlotState) -> SlotState:
    """The slots as the draft model reads them."""
    return slots._replace(block_table=slots.block_table[:1])
