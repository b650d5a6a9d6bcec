"""The cache, slots and counts on the devices: allocated, updated, copied, moved to the host, and freed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import batched
from typing import Any

import jax
import numpy as np

from jengine.execution.batch import BatchLayout
from jengine.execution.device_state import ALLOCATE, PINNED, DeviceState, copied
from jengine.execution.kinds.kind import CallKind, DeviceCall, Kind, Program, allocation, partitions
from jengine.execution.kv_cache import COPIES, Page, fill_pages, make_copy, spill_pages
from jengine.execution.slots import UPDATE_WORDS, pack_updates, update_slots
from jengine.execution.spec import ExecutionSpec
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import SWAPS
from jengine.table.ready_programs import ReadyPrograms


class Allocate(Kind[str]):
    """Allocates the cache and the slots, all zeros."""

    name, while_serving, joint = ALLOCATE, False, True

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        return allocation(key, (spec.cache, spec.slots))

    def run(self, state: DeviceState, key: str, array: None) -> None:
        state.allocate()


class PageCopies(Kind[str]):
    """Copies pages of the shared pool, int32 [2, COPIES] of sources and targets."""

    name, uses_cache = "copy", True

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        copy = make_copy(spec.mesh.devices.flat[0])
        return Program(
            "copy_pages",
            copy,
            (spec.cache, spec.whole(np.int32, COPIES), spec.whole(np.int32, COPIES)),
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


class SlotUpdates(Kind[str]):
    """Applies block table entries and slot resets, int32 [UPDATE_WORDS]; see slots.pack_updates."""

    name = "update"

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        return Program(
            "update_slots",
            update_slots,
            (spec.slots, spec.whole(np.int32, UPDATE_WORDS)),
            partitions(spec.slots),
            (0,),
        )

    def run(self, state: DeviceState, key: str, array: np.ndarray) -> None:
        state.slots = state.programs[key](state.slots, state.put(array))

    def calls(self, spec: ExecutionSpec, layout: BatchLayout, plan: StepPlan) -> Iterator[DeviceCall]:
        for packed in pack_updates(*layout.rest(plan)):
            yield DeviceCall(self.name, packed)

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[str, DeviceCall]:
        return {self.name: DeviceCall(self.name, np.zeros(UPDATE_WORDS, np.int32))}


class Spill(Kind[str]):
    """Copies pages to the host, int32 [2, SWAPS] of pages and host pages."""

    name, uses_cache = "spill", True

    def keys(self, spec: ExecutionSpec) -> Sequence[str]:
        return [self.name] if spec.host_pages else []

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[str, DeviceCall]:
        return {key: swap_call(key, []) for key in self.keys(spec)}

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        return Program(
            "spill_pages",
            spill_pages,
            (spec.cache, spec.whole(np.int32, SWAPS)),
            [partitions(spec.page)] * SWAPS,
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
        args = spec.cache, [spec.page] * SWAPS, spec.whole(np.int32, SWAPS)
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


class MoveWeights(CallKind[str]):
    """Moves the weights, int32 [2]: whether to the host's memory, which on a CPU holds them already; and
    whether the model's are kept. Those of a draft model are, in any case.
    """

    name = "move-weights"

    def run(self, state: DeviceState, key: str, array: np.ndarray) -> None:
        away, keep = array.tolist()
        spec, leaves, draft = state.spec, state.leaves if keep else (), state.draft_only_leaves
        if spec.mesh.local_devices[0].platform == "gpu":
            leaves = _moved(leaves, spec.leaves, away)
            like = () if spec.drafting is None else spec.drafting.leaves
            draft = _moved(draft, state.only_of_draft(like), away)
        state.put_leaves(leaves, draft)


def _moved(leaves: Sequence[jax.Array], like: Sequence[Any], away: bool) -> tuple[jax.Array, ...]:
    """These leaves, if there are any, on the host or on the devices; copies of those that are elsewhere."""
    memory = PINNED if away else None
    moved = (
        leaf if (leaf.sharding.memory_kind == PINNED) == away else copied(leaf, target.sharding, memory)
        for leaf, target in zip(leaves, like, strict=False)
    )
    done: tuple[jax.Array, ...] = jax.block_until_ready(tuple(moved))
    return done
