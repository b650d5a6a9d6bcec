"""Copies of pages within the cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import batched

import numpy as np

from jengine.execution.batch import BatchLayout
from jengine.execution.device_state import DeviceState
from jengine.execution.kinds.kind import DeviceCall, Kind, Program, ints, partitions
from jengine.execution.kv_cache import COPIES, make_copy
from jengine.execution.spec import ExecutionSpec
from jengine.scheduling.step_plan import StepPlan
from jengine.table.ready_programs import ReadyPrograms


class PageCopies(Kind[str]):
    """Copies pages of the shared pool, int32 [2, COPIES] of sources and targets."""

    name, uses_cache = "copy", True

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        copy = make_copy(spec.mesh.devices.flat[0])
        return Program(
            "copy_pages",
            copy,
            (spec.cache, ints(spec, COPIES), ints(spec, COPIES)),
            partitions(spec.cache),
            (0,),
        )

    def run(self, state: DeviceState, key: str, array: np.ndarray) -> None:
        state.cache = state.programs[key](state.cache, *map(state.put, array))

    def calls(self, spec: ExecutionSpec, layout: BatchLayout, plan: StepPlan) -> Iterator[DeviceCall]:
        for copies in batched(plan.copies, COPIES):
            pages = np.zeros((2, COPIES), np.int32)
            pages[:, : len(copies)] = np.array([(source, target) for _, source, target in copies], np.int32).T
            yield DeviceCall(self.name, pages)

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[str, DeviceCall]:
        return {self.name: DeviceCall(self.name, np.zeros((2, COPIES), np.int32))}
