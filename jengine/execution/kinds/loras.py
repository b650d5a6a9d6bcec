"""LoRA adapters on the devices. Without `enable_lora`, a table has none of these programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.execution.device_state import ALLOCATE_LORAS, DeviceState
from jengine.execution.kinds.kind import DeviceCall, Kind, Program, ints, partitions
from jengine.execution.loras import HEADER, write
from jengine.execution.spec import ExecutionSpec
from jengine.table.ready_programs import ReadyPrograms


class AllocateLoras(Kind[str]):
    """Allocates the stacked adapters, all zeros."""

    name, while_serving = ALLOCATE_LORAS, False

    def keys(self, spec: ExecutionSpec) -> Sequence[str]:
        return [self.name] if spec.stacks else []

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        stacks = spec.stacks

        def allocate() -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stacks)

        return Program("allocate_adapters", allocate, (), partitions(stacks), by_shard=False)

    def run(self, state: DeviceState, key: str, array: None) -> None:
        state.stacks = state.programs[key]()


class WriteLora(Kind[str]):
    """Writes an adapter to a place, in the arrays that are there: uint8 as of `LoraShapes.pack`, with the
    place, from 1, as its first int32.
    """

    name = "write-adapter"

    def keys(self, spec: ExecutionSpec) -> Sequence[str]:
        return [self.name] if spec.stacks else []

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        assert spec.adapters is not None
        args = spec.stacks, spec.adapters.packed, ints(spec, 1)
        return Program("write_adapter", write, args, partitions(spec.stacks), (0,))

    def run(self, state: DeviceState, key: str, array: np.ndarray) -> None:
        assert state.spec.adapters is not None
        like = state.spec.adapters.packed
        numbers = array[HEADER:].view(like.dtype).reshape(like.shape)
        place = state.put(array[:4].view(np.int32) - 1)
        state.stacks = state.programs[key](state.stacks, state.put_sharded(numbers, like), place)

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[str, DeviceCall]:
        if spec.adapters is None or not spec.stacks:
            return {}
        return {self.name: write_call(spec.adapters.nothing(), 1)}


def write_call(packed: np.ndarray, place: int) -> DeviceCall:
    """The call that writes a packed adapter to a place, from 1. The array keeps the place that it is for."""
    packed[:4].view(np.int32)[0] = place
    return DeviceCall(WriteLora.name, packed)
