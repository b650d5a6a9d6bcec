"""Trunks: embedding, layers and final norm over a step's rows and tiles."""

from __future__ import annotations

import numpy as np

from jengine.execution.device_state import DeviceState
from jengine.execution.draft import make_follow
from jengine.execution.kinds.kind import Kind, Program, lora_of, of_leaves, partitions
from jengine.execution.memory import trunk_temporaries
from jengine.execution.spec import ExecutionSpec
from jengine.execution.trunk import make_trunk
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import TrunkKey
from jengine.table.ready_programs import ReadyPrograms


class Trunk(Kind[TrunkKey]):
    """Runs a step's packed batch, int32 [layout size], see batch.BatchLayout; or a stage's part of it."""

    name, key, joint = "trunk", TrunkKey, True
    each_step = True

    def program(self, spec: ExecutionSpec, key: TrunkKey) -> Program:
        stage = spec.stage
        follow = None if spec.draft is None else make_follow(spec, key)
        trunk = make_trunk(spec, spec.layout(key), follow=follow, adapt=lora_of(spec, key))
        pool = () if spec.images is None else (spec.images.pool,)
        entering = () if stage.first else (spec.entering(key),)
        args = spec.both_leaves, spec.stacks if key.adapted else (), spec.cache, spec.slots
        out = partitions(spec.cache), *[spec.by_rank] * (3 if stage.last else 2)
        name = f"trunk_{key.rows}_{key.tiles}_{key.pages}"
        name += f"_lora{key.adapted}" if key.adapted else ""
        name += f"_stage{stage.index}" if spec.model.stage is not None else ""
        return Program(
            name, of_leaves(spec, trunk, both=True), (*args, spec.packed(key), pool, entering), out, (2, 3)
        )

    def run(self, state: DeviceState, key: TrunkKey, array: np.ndarray) -> None:
        stage = state.spec.stage
        pool = () if state.pool is None else (state.pool,)
        entering = () if stage.first else (state.entering,)
        args = state.both_leaves, state.stacks if key.adapted else (), state.cache, state.slots
        outs = state.programs[key](*args, state.put(array), pool, entering)
        state.cache, state.slots, *results = outs
        if stage.last:
            state.to_sample, state.tiles = results
        else:
            (state.leaving,) = results

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[TrunkKey, StepPlan]:
        return {key: StepPlan(key, ready.sampler(key, "greedy")) for key in ready.trunks()}

    def heaviest(self, spec: ExecutionSpec) -> TrunkKey:
        return max(spec.table.trunks(), key=lambda key: (spec.table.tokens(key), key.pages, key.adapted))

    def temporaries(self, spec: ExecutionSpec, key: TrunkKey) -> int:
        return trunk_temporaries(spec, key)

    def compile_effort(self, spec: ExecutionSpec, key: TrunkKey) -> tuple[int, int]:
        """The largest is compiled before anything else, which shows early whether memory suffices."""
        return 4 if key == self.heaviest(spec) else 2, spec.table.tokens(key)
