"""Pages that move between the cache and host memory. Without a host tier, a table has none of these
programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jengine.execution.device_state import DeviceState
from jengine.execution.kinds.kind import CallKind, DeviceCall, Kind, Program, ints, partitions
from jengine.execution.kv_cache import Page, fill_pages, spill_pages
from jengine.execution.spec import ExecutionSpec
from jengine.table.pages import SWAPS
from jengine.table.ready_programs import ReadyPrograms


class Spill(Kind[str]):
    """Copies pages to the host, int32 [2, SWAPS] of pages and host pages."""

    name, uses_cache = "spill", True

    def keys(self, spec: ExecutionSpec) -> Sequence[str]:
        return [self.name] if spec.host_pages else []

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[str, DeviceCall]:
        return {key: swap_call(key, []) for key in self.keys(spec)}

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        return Program(
            "spill_pages", spill_pages, (spec.cache, ints(spec, SWAPS)), [partitions(spec.page)] * SWAPS
        )

    def run(self, state: DeviceState, key: str, array: np.ndarray) -> list[Page]:
        assert state.store is not None
        pages, host_pages = array
        return state.store.keep(host_pages.tolist(), state.programs[key](state.cache, state.put(pages)))


class Stage(CallKind[str]):
    """Copies host pages to the device, int32 [2, n] of host pages and places."""

    name = "stage"

    def run(self, state: DeviceState, key: str, array: np.ndarray) -> list[Page]:
        assert state.store is not None
        return state.store.stage(*array.tolist())


class Fill(Kind[str]):
    """Copies staged pages into the cache, int32 [2, SWAPS] of places and pages."""

    name, uses_cache = "fill", True

    def keys(self, spec: ExecutionSpec) -> Sequence[str]:
        return [self.name] if spec.host_pages else []

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[str, DeviceCall]:
        return {key: swap_call(key, []) for key in self.keys(spec)}

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        args = spec.cache, [spec.page] * SWAPS, ints(spec, SWAPS)
        return Program("fill_pages", fill_pages, args, partitions(spec.cache), (0,))

    def run(self, state: DeviceState, key: str, array: np.ndarray) -> None:
        assert state.store is not None
        places, pages = array
        state.cache = state.programs[key](state.cache, state.store.take(places.tolist()), state.put(pages))


def swap_call(name: str, numbers: Sequence[tuple[int, int]]) -> DeviceCall:
    """A call that moves at most SWAPS pages, padded with null pages."""
    padded = np.zeros((2, SWAPS), np.int32)
    padded[:, : len(numbers)] = np.array(numbers, np.int32).reshape(-1, 2).T
    return DeviceCall(name, padded)
