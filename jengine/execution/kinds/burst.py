"""Bursts: several decode steps in one program."""

from __future__ import annotations

import numpy as np
from jax.sharding import PartitionSpec

from jengine.execution.burst import make_burst
from jengine.execution.device_state import DeviceState, start_host_copy
from jengine.execution.kinds.kind import (
    Kind,
    Program,
    head_lora_of,
    ints,
    lora_of,
    of_leaves,
    partitions,
)
from jengine.execution.sampler import Sampled
from jengine.execution.spec import ExecutionSpec
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import BurstKey
from jengine.table.ready_programs import ReadyPrograms


class Burst(Kind[BurstKey]):
    """Runs the key's steps on a packed batch and the rows' lengths; see burst.pack_burst."""

    name, key = "burst", BurstKey
    each_step = True

    def program(self, spec: ExecutionSpec, key: BurstKey) -> Program:
        layout = spec.layout(key.trunk)
        burst = make_burst(
            spec.model,
            key,
            layout,
            spec.page_size,
            spec.mesh.devices.flat[0],
            lora_of(spec, key.trunk),
            head_lora_of(spec) if key.trunk.adapted else None,
        )
        stacks = (spec.stacks,) if key.trunk.adapted else ()
        arrays = spec.cache, spec.slots, ints(spec, layout.size + key.trunk.rows)
        out = partitions(spec.cache), PartitionSpec(), PartitionSpec()
        name = f"burst_{key.trunk.rows}_{key.sampler.variant}_{key.trunk.pages}"
        first = 1 + len(stacks)
        return Program(
            f"{name}{f'_lora{key.trunk.adapted}' if key.trunk.adapted else ''}",
            of_leaves(spec, burst),
            (spec.leaves, *stacks, *arrays),
            out,
            (first, first + 1),
        )

    def run(self, state: DeviceState, key: BurstKey, array: np.ndarray) -> Sampled:
        stacks = (state.stacks,) if key.trunk.adapted else ()
        state.cache, state.slots, sampled = state.programs[key](
            state.leaves, *stacks, state.cache, state.slots, state.put(array)
        )
        result: Sampled = start_host_copy(sampled)
        return result

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[BurstKey, StepPlan]:
        return {key: StepPlan(key.trunk, key.sampler, steps=key.steps) for key in ready.bursts()}

    def compile_effort(self, spec: ExecutionSpec, key: BurstKey) -> tuple[int, int]:
        return 1, key.trunk.rows
