"""What a trunk's tiles give the host: log probabilities of prompt tokens, and sums of hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jengine.execution.batch import BatchLayout
from jengine.execution.device_state import DeviceState, start_host_copy
from jengine.execution.kinds.kind import DeviceCall, Kind, Program, head_lora_of, of_leaves
from jengine.execution.memory import sampler_temporaries
from jengine.execution.sampler import SampledLogprobs, make_scorer
from jengine.execution.spec import ExecutionSpec
from jengine.scheduling.step_plan import Span, StepPlan
from jengine.table.program_table import PoolKey, ScoreKey
from jengine.table.ready_programs import ReadyPrograms


class Score(Kind[ScoreKey]):
    """Scores the last trunk's tiles, with int32 [tiles * tile_size] of following tokens, and their slots."""

    name, key = "score", ScoreKey
    everywhere = False

    def program(self, spec: ExecutionSpec, key: ScoreKey) -> Program:
        scorer = of_leaves(spec, make_scorer(spec.model, spec.table.tile_size, head_lora_of(spec)))
        packed = spec.whole(np.int32, key.tiles * (spec.table.tile_size + 1))
        args = spec.leaves, spec.head_stacks, spec.slots.sampling, spec.tiles(key.tiles), packed
        return Program(f"score_{key.tiles}", scorer, args, PartitionSpec())

    def run(self, state: DeviceState, key: ScoreKey, array: np.ndarray) -> SampledLogprobs:
        weights = state.leaves, state.head_stacks
        scores: SampledLogprobs = start_host_copy(
            state.programs[key](*weights, state.slots.sampling, state.tiles, state.put(array))
        )
        return scores

    def calls(self, spec: ExecutionSpec, layout: BatchLayout, plan: StepPlan) -> Iterator[DeviceCall]:
        if not any([span.targets for span in plan.spans]):
            return
        tiles, size = spec.table.passed_tiles(plan.trunk.tiles), spec.table.tile_size
        packed = np.zeros(tiles * (size + 1), np.int32)
        targets, slots = packed[: tiles * size].reshape(tiles, size), packed[tiles * size :]
        for row, (number, offset, length) in enumerate(spec.table.place(plan.spans).tiles):
            wanted = (plan.spans[number].targets or [])[offset : offset + length]
            targets[row, : len(wanted)], slots[row] = wanted, plan.spans[number].slot
        yield DeviceCall(ScoreKey(tiles), packed)

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[ScoreKey, StepPlan]:
        return {key: _example(ready, key.tiles, targets=[0]) for key in ready.scores()}

    def heaviest(self, spec: ExecutionSpec) -> ScoreKey:
        return ScoreKey(spec.table.max_tiles)

    def temporaries(self, spec: ExecutionSpec, key: ScoreKey) -> int:
        """Bytes of temporaries: as many logits as a sampler's, since a scorer works tile by tile."""
        return sampler_temporaries(spec, spec.table.tile_size)


class Pool(Kind[PoolKey]):
    """Pools the last trunk's tiles, with int32 [tiles, 2] of each tile's start and end."""

    name, key = "pool", PoolKey
    everywhere = False

    def program(self, spec: ExecutionSpec, key: PoolKey) -> Program:
        args = spec.tiles(key.tiles), spec.whole(np.int32, key.tiles, 2)
        return Program(f"pool_{key.tiles}", make_pooler(spec.table.tile_size), args, PartitionSpec())

    def run(self, state: DeviceState, key: PoolKey, array: np.ndarray) -> jax.Array:
        pooled: jax.Array = start_host_copy(state.programs[key](state.tiles, state.put(array)))
        return pooled

    def calls(self, spec: ExecutionSpec, layout: BatchLayout, plan: StepPlan) -> Iterator[DeviceCall]:
        if all([span.pool is None for span in plan.spans]):
            return
        ranges = np.zeros((spec.table.passed_tiles(plan.trunk.tiles), 2), np.int32)
        for row, (number, offset, length) in zip(ranges, spec.table.place(plan.spans).tiles, strict=False):
            pool = plan.spans[number].pool
            if pool is not None and pool < offset + length:
                row[:] = max(pool - offset, 0), length
        yield DeviceCall(PoolKey(len(ranges)), ranges)

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[PoolKey, StepPlan]:
        return {key: _example(ready, key.tiles, pool=0) for key in ready.pools()}


def _example(ready: ReadyPrograms, tiles: int, **wanted: Any) -> StepPlan:
    """A step with so many tiles of a token, of which something is wanted."""
    trunk = ready.trunk(0, tiles)
    return StepPlan(trunk, ready.sampler(trunk, "greedy"), [Span(0, 0, 0, 1, [0], **wanted)] * tiles)


def make_pooler(tile_size: int) -> Callable[..., jax.Array]:
    """The function to compile: (hidden [tokens, hidden_size], ranges int32 [tiles, 2]) -> float32 [tiles,
    hidden_size].

    Each tile's sum is over its tokens at [start, end); 0 if there are none.
    """

    def pool(hidden: jax.Array, ranges: jax.Array) -> jax.Array:
        tiles = hidden.reshape(-1, tile_size, hidden.shape[-1]).astype(jnp.float32)
        token = jnp.arange(tile_size)
        wanted = (token >= ranges[:, :1]) & (token < ranges[:, 1:])
        return jnp.where(wanted[..., None], tiles, 0.0).sum(1)  # not a product: padding may contain NaN

    return pool
