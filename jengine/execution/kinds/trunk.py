"""Trunks: embedding, layers and final norm over a step's rows and tiles."""

from __future__ import annotations

import numpy as np

from jengine.execution.device_state import DeviceState
from jengine.execution.draft import make_follow
from jengine.execution.kinds.kind import Kind, Program, lora_of, of_both_leaves, of_leaves, partitions
from jengine.execution.memory import trunk_temporaries
from jengine.execution.spec import ExecutionSpec
from jengine.execution.trunk import make_stage_trunk, make_trunk
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import MOST_STATES, TrunkKey
from jengine.table.ready_programs import ReadyPrograms


class Trunk(Kind[TrunkKey]):
    """Runs a step's packed batch, int32 [layout size], see batch.BatchLayout; or a stage's part of it."""

    name, key, joint = "trunk", TrunkKey, True
    each_step = True

    def program(self, spec: ExecutionSpec, key: TrunkKey) -> Program:
        if spec.model.stage is not None:
            return self._of_stage(spec, key)
        device, invariant = spec.mesh.devices.flat[0], spec.table.batch_invariant
        trunk = make_trunk(
            spec.model,
            spec.layout(key),
            spec.page_size,
            device,
            passed=spec.table.passed_tiles(key.tiles) * spec.table.tile_size,
            batch_invariant=invariant,
            following=MOST_STATES if spec.draft_states else 0,
            follow=None
            if spec.draft is None
            else make_follow(spec.model, spec.draft, key, spec.page_size, device),
            reads=None if spec.draft is None else spec.draft.reads,
            adapt=lora_of(spec, key),
            sees=spec.images is not None,
        )
        arrays = (
            spec.cache,
            spec.slots,
            spec.packed(key),
            *(() if spec.images is None else (spec.images.pool,)),
        )
        out = partitions(spec.cache), *[spec.by_rank] * 3
        name = f"trunk_{key.rows}_{key.tiles}_{key.pages}{f'_lora{key.adapted}' if key.adapted else ''}"
        stacks = (spec.stacks,) if key.adapted else ()
        first = 1 + len(stacks)
        return Program(
            name, of_both_leaves(spec, trunk), (spec.both_leaves, *stacks, *arrays), out, (first, first + 1)
        )

    def _of_stage(self, spec: ExecutionSpec, key: TrunkKey) -> Program:
        trunk = make_stage_trunk(spec, key)
        entering = () if spec.stage.first else (spec.entering(key),)
        args = spec.leaves, spec.cache, spec.slots, spec.packed(key), *entering
        out = partitions(spec.cache), *[spec.by_rank] * (3 if spec.stage.last else 2)
        name = f"trunk_{key.rows}_{key.tiles}_{key.pages}_stage{spec.stage.index}"
        return Program(name, of_leaves(spec, trunk), args, out, (1, 2))

    def run(self, state: DeviceState, key: TrunkKey, array: np.ndarray) -> None:
        stage = state.spec.stage
        if not stage.last or not stage.first:
            entering = () if stage.first else (state.entering,)
            outs = state.programs[key](state.leaves, state.cache, state.slots, state.put(array), *entering)
            state.cache, state.slots, *results = outs
            if stage.last:
                state.to_sample, state.tiles = results
            else:
                (state.leaving,) = results
            return
        stacks = (state.stacks,) if key.adapted else ()
        arrays = state.cache, state.slots, state.put(array), *(() if state.pool is None else (state.pool,))
        outs = state.programs[key](state.both_leaves, *stacks, *arrays)
        state.cache, state.slots, state.to_sample, state.tiles = outs

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[TrunkKey, StepPlan]:
        return {key: StepPlan(key, ready.sampler(key, "greedy")) for key in ready.trunks()}

    def heaviest(self, spec: ExecutionSpec) -> TrunkKey:
        return max(spec.table.trunks(), key=lambda key: (spec.table.tokens(key), key.pages, key.adapted))

    def temporaries(self, spec: ExecutionSpec, key: TrunkKey) -> int:
        return trunk_temporaries(spec, key)

    def compile_effort(self, spec: ExecutionSpec, key: TrunkKey) -> tuple[int, int]:
        """The largest is compiled before anything else, which shows early whether memory suffices."""
        return 4 if key == self.heaviest(spec) else 2, spec.table.tokens(key)
