"""The compiled burst: several decode steps, each a trunk and a sampler, without the host in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jengine.execution.batch import BatchLayout
from jengine.execution.kv_cache import Cache
from jengine.execution.loras import Stacks
from jengine.execution.sampler import Sampled, make_sampler
from jengine.execution.slots import SlotState, updated
from jengine.execution.trunk import Adapt, make_pass, to_sample, without_adapters
from jengine.models import Model, Params
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import BurstKey

BurstOut = tuple[Cache, SlotState, Sampled]  # the last is int32 [steps, sampler rows]


def make_burst(
    model: Model,
    key: BurstKey,
    layout: BatchLayout,
    page_size: int,
    device: jax.Device,
    adapt: Adapt | None = None,
    adapt_head: Adapt | None = None,
) -> Callable[..., BurstOut]:
    """The function to compile: (params, cache, slots, packed batch and lengths) -> (cache, slots, tokens).

    A row takes part in its first `length` steps; in later steps it is padding. After its first step it takes
    its token and position from its slot. The loop has a fixed length, so it needs no host.
    """
    run, sample = (
        make_pass(model, layout.key, page_size, device, adapt),
        make_sampler(model, key.sampler.variant, adapt=adapt_head),
    )

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
            adapters = () if adapt_head is None else (stacks,)
            to = to_sample(now, axis, hidden)
            last, sampled = sample(params, *adapters, last, slots.sampling, to)
            return (cache, last), sampled.tokens

        (cache, last), tokens = lax.scan(step, (cache, slots.last), jnp.arange(key.steps, dtype=jnp.int32))
        return cache, slots._replace(last=last), Sampled(tokens)

    return burst if adapt is not None else partial(without_adapters, burst)


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
