"""Programs of several steps: bursts of decode steps, and drafts of a draft model."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jengine.execution.batch import BatchLayout
from jengine.execution.device_state import DeviceState, start_host_copy
from jengine.execution.draft import draft_words, make_draft
from jengine.execution.kinds.kind import (
    DeviceCall,
    Kind,
    Program,
    head_lora_of,
    lora_of,
    of_leaves,
    partitions,
)
from jengine.execution.kv_cache import Cache
from jengine.execution.loras import Stacks
from jengine.execution.memory import sampler_temporaries, trunk_temporaries
from jengine.execution.sampler import Sampled, make_sampler
from jengine.execution.slots import SlotState, updated
from jengine.execution.spec import ExecutionSpec
from jengine.execution.trunk import make_pass, to_sample
from jengine.models import Params
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import BurstKey, DraftKey, TrunkKey
from jengine.table.ready_programs import ReadyPrograms

BurstOut = tuple[Cache, SlotState, Sampled]  # the last is int32 [steps, sampler rows]


def make_burst(spec: ExecutionSpec, key: BurstKey) -> Callable[..., BurstOut]:
    """The function to compile: (params, stacked adapters, cache, slots, packed batch and lengths) -> (cache,
    slots, tokens).

    A row takes part in its first `length` steps; in later steps it is padding. After its first step it takes
    its token and position from its slot. The loop has a fixed length, so it needs no host.
    """
    layout, adapt_head = spec.layout(key.trunk), head_lora_of(spec) if key.trunk.adapted else None
    run = make_pass(spec, key.trunk, adapt=lora_of(spec, key.trunk))
    sample = make_sampler(spec.model, key.sampler.variant, adapt=adapt_head)

    def burst(params: Params, stacks: Stacks, cache: Cache, slots: SlotState, packed: jax.Array) -> BurstOut:
        batch, lengths = layout.unpack(packed[: layout.size]), packed[layout.size :]
        slots = updated(slots, batch.table, batch.resets)

        def step(
            state: tuple[Cache, jax.Array], number: jax.Array
        ) -> tuple[tuple[Cache, jax.Array], jax.Array]:
            cache, last = state
            going = number < lengths
            now = batch._replace(
                row_slots=jnp.where(going, batch.row_slots, 0),
                row_tokens=jnp.where(going, jnp.where(number == 0, batch.row_tokens, -1), 0),
                row_states=_states(batch.row_states, going, number),
                row_turns=jnp.where(number == 0, batch.row_turns, batch.row_turns[:, -1:]),
                sample_slots=jnp.where(going[batch.sample_tokens], batch.sample_slots, 0),
            )
            cache, axis, hidden = run(params, cache, slots._replace(last=last), now, stacks=stacks)
            to = to_sample(now, axis, hidden)
            last, sampled = sample(params, stacks, last, slots.sampling, to)
            return (cache, last), sampled.tokens

        (cache, last), tokens = lax.scan(step, (cache, slots.last), jnp.arange(key.steps, dtype=jnp.int32))
        return cache, slots._replace(last=last), Sampled(tokens)

    return burst


def _states(pages: jax.Array, going: jax.Array, number: jax.Array) -> jax.Array:
    """State pages that rows read and write in a step. [0, 2] stays as it is.

    After the first step, a row reads the page that it wrote. A row that does not take part writes to the null
    page.
    """
    if not pages.shape[0]:
        return pages
    sources, targets = pages.T
    targets = jnp.where(going, targets, 0)
    return jnp.stack([jnp.where(number == 0, sources, targets), targets], axis=1)


def pack_burst(layout: BatchLayout, plan: StepPlan) -> np.ndarray:
    """int32 [layout.size + rows]: the batch, and the number of steps in which each row takes part."""
    lengths = np.zeros(layout.key.rows, np.int32)
    lengths[: len(plan.spans)] = [span.length for span in plan.spans]
    return np.concatenate([layout.pack(plan), lengths])


class Burst(Kind[BurstKey]):
    """Runs the key's steps on a packed batch and the rows' lengths; see burst.pack_burst."""

    name, key = "burst", BurstKey
    each_step = True

    def program(self, spec: ExecutionSpec, key: BurstKey) -> Program:
        packed = spec.whole(np.int32, spec.layout(key.trunk).size + key.trunk.rows)
        args = spec.leaves, spec.stacks if key.trunk.adapted else (), spec.cache, spec.slots, packed
        out = partitions(spec.cache), PartitionSpec(), PartitionSpec()
        name = f"burst_{key.trunk.rows}_{key.sampler.variant}_{key.trunk.pages}"
        name += f"_lora{key.trunk.adapted}" if key.trunk.adapted else ""
        return Program(name, of_leaves(spec, make_burst(spec, key)), args, out, (2, 3))

    def run(self, state: DeviceState, key: BurstKey, array: np.ndarray) -> Sampled:
        args = state.leaves, state.stacks if key.trunk.adapted else (), state.cache, state.slots
        state.cache, state.slots, sampled = state.programs[key](*args, state.put(array))
        result: Sampled = start_host_copy(sampled)
        return result

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[BurstKey, StepPlan]:
        return {key: StepPlan(key.trunk, key.sampler, steps=key.steps) for key in ready.bursts()}

    def compile_effort(self, spec: ExecutionSpec, key: BurstKey) -> tuple[int, int]:
        return 1, key.trunk.rows


class Draft(Kind[DraftKey]):
    """Proposes tokens for slots, before the trunk that verifies them; see draft.pack_drafts."""

    name, key = "draft", DraftKey
    each_step = True

    def program(self, spec: ExecutionSpec, key: DraftKey) -> Program:
        assert spec.drafting is not None
        packed = spec.whole(np.int32, draft_words(key, spec.page_size))
        args = spec.drafting.leaves, spec.cache, spec.slots, packed
        out = partitions(spec.cache), partitions(spec.slots), PartitionSpec()
        name = f"draft_{key.rows}_{key.tokens}_{key.pages}"
        return Program(name, of_leaves(spec.drafting, make_draft(spec, key)), args, out, (1, 2))

    def run(self, state: DeviceState, key: DraftKey, array: np.ndarray) -> Sampled:
        state.cache, state.slots, drafts = state.programs[key](
            state.draft_leaves, state.cache, state.slots, state.put(array)
        )
        result: Sampled = start_host_copy(drafts)
        return result

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[DraftKey, DeviceCall]:
        return {
            key: DeviceCall(key, np.zeros(draft_words(key, spec.page_size), np.int32))
            for key in ready.drafts()
        }

    def heaviest(self, spec: ExecutionSpec) -> DraftKey | None:
        return max(self.keys(spec), key=lambda key: (key.rows, key.pages), default=None)

    def temporaries(self, spec: ExecutionSpec, key: DraftKey) -> int:
        """Bytes of a step of the draft model: its trunk and its sampler."""
        assert spec.drafting is not None
        trunk = trunk_temporaries(spec.drafting, TrunkKey(key.rows, 0, key.pages))
        return trunk + sampler_temporaries(spec.drafting, key.rows)

    def compile_effort(self, spec: ExecutionSpec, key: DraftKey) -> tuple[int, int]:
        return 1, key.rows
