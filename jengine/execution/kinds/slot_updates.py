"""Updates of slots that do not fit into a trunk's batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jengine.execution.batch import BatchLayout
from jengine.execution.device_state import DeviceState
from jengine.execution.kinds.kind import DeviceCall, Kind, Program, ints, partitions
from jengine.execution.slots import UPDATE_WORDS, pack_updates, update_slots
from jengine.execution.spec import ExecutionSpec
from jengine.scheduling.step_plan import StepPlan
from jengine.table.ready_programs import ReadyPrograms


class SlotUpdates(Kind[str]):
    """Applies block table entries and slot resets, int32 [UPDATE_WORDS]; see slots.pack_updates."""

    name = "update"

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        return Program(
            "update_slots", update_slots, (spec.slots, ints(spec, UPDATE_WORDS)), partitions(spec.slots), (0,)
        )

    def run(self, state: DeviceState, key: str, array: np.ndarray) -> None:
        state.slots = state.programs[key](state.slots, state.put(array))

    def calls(self, spec: ExecutionSpec, layout: BatchLayout, plan: StepPlan) -> Iterator[DeviceCall]:
        for packed in pack_updates(*layout.rest(plan)):
            yield DeviceCall(self.name, packed)

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[str, DeviceCall]:
        return {self.name: DeviceCall(self.name, np.zeros(UPDATE_WORDS, np.int32))}
