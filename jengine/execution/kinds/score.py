"""Scorers: log probabilities of the tokens that follow a trunk's prompt tiles."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jax.sharding import PartitionSpec

from jengine.execution.batch import BatchLayout
from jengine.execution.device_state import DeviceState, start_host_copy
from jengine.execution.kinds.kind import DeviceCall, Kind, Program, ints, of_leaves
from jengine.execution.memory import sampler_temporaries
from jengine.execution.sampler import SampledLogprobs, make_scorer
from jengine.execution.spec import ExecutionSpec
from jengine.scheduling.step_plan import Span, StepPlan
from jengine.table.program_table import ScoreKey
from jengine.table.ready_programs import ReadyPrograms


class Score(Kind[ScoreKey]):
    """Scores the last trunk's tiles, with int32 [tiles * tile_size] of the tokens that follow."""

    name, key = "score", ScoreKey

    def program(self, spec: ExecutionSpec, key: ScoreKey) -> Program:
        scorer = of_leaves(spec, make_scorer(spec.model, spec.table.tile_size))
        args = spec.leaves, spec.tiles(key.tiles), ints(spec, key.tiles * spec.table.tile_size)
        return Program(f"score_{key.tiles}", scorer, args, PartitionSpec())

    def run(self, state: DeviceState, key: ScoreKey, array: np.ndarray) -> SampledLogprobs:
        scores: SampledLogprobs = start_host_copy(
            state.programs[key](state.leaves, state.tiles, state.put(array))
        )
        return scores

    def calls(self, spec: ExecutionSpec, layout: BatchLayout, plan: StepPlan) -> Iterator[DeviceCall]:
        if not any([span.targets for span in plan.spans]):
            return
        targets = np.zeros((plan.trunk.tiles, spec.table.tile_size), np.int32)
        for row, (number, offset, length) in zip(targets, spec.table.place(plan.spans).tiles, strict=False):
            wanted = (plan.spans[number].targets or [])[offset : offset + length]
            row[: len(wanted)] = wanted
        yield DeviceCall(ScoreKey(plan.trunk.tiles), targets.reshape(-1))

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[ScoreKey, StepPlan]:
        def plan(key: ScoreKey) -> StepPlan:
            trunk = ready.trunk(0, key.tiles)
            return StepPlan(trunk, ready.sampler(trunk, "greedy"), [Span(0, 0, 0, 1, [0], [0])] * key.tiles)

        return {key: plan(key) for key in ready.scores()}

    def heaviest(self, spec: ExecutionSpec) -> ScoreKey:
        return ScoreKey(spec.table.max_tiles)

    def temporaries(self, spec: ExecutionSpec, key: ScoreKey) -> int:
        """It works tile by tile, and computes as many logits as a sampler."""
        return sampler_temporaries(spec, spec.table.tile_size)
