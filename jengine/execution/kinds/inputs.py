"""What steps read beside their batch: stacked LoRA adapters, and the pool of images' embeddings. Tables of
engines without them have none of these programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from jengine.execution.device_state import DeviceState
from jengine.execution.kinds.kind import DeviceCall, Kind, Program, partitions
from jengine.execution.loras import HEADER, write
from jengine.execution.spec import ExecutionSpec
from jengine.scheduling.step_plan import Encoding
from jengine.table.program_table import EncoderKey
from jengine.table.ready_programs import ReadyPrograms


class WriteLora(Kind[str]):
    """Writes an adapter: uint8 as of `LoraShapes.pack`, whose first int32 is the place, from 1."""

    name = "write-adapter"

    def keys(self, spec: ExecutionSpec) -> Sequence[str]:
        return [self.name] if spec.stacks else []

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        assert spec.adapters is not None
        args = spec.stacks, spec.adapters.packed, spec.whole(np.int32, 1)
        return Program("write_adapter", write, args, partitions(spec.stacks), (0,))

    def run(self, state: DeviceState, key: str, array: np.ndarray) -> None:
        assert state.spec.adapters is not None
        like = state.spec.adapters.packed
        numbers = array[HEADER:].view(like.dtype).reshape(like.shape)
        place = state.put(array[:4].view(np.int32) - 1)
        state.stacks = state.programs[key](state.stacks, state.put(numbers, like.sharding), place)

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[str, DeviceCall]:
        if spec.adapters is None or not spec.stacks:
            return {}
        return {self.name: write_call(spec.adapters.nothing(), 1)}


def write_call(packed: np.ndarray, place: int) -> DeviceCall:
    """The call that writes a packed adapter to a place, from 1. The array keeps the place that it is for."""
    packed[:4].view(np.int32)[0] = place
    return DeviceCall(WriteLora.name, packed)


class EncodeImages(Kind[EncoderKey]):
    """Encodes a packed bucket of patches, see `ImageShapes.pack`, into rows of the pool."""

    name, key = "encoder", EncoderKey

    def program(self, spec: ExecutionSpec, key: EncoderKey) -> Program:
        assert spec.images is not None
        shapes, packed = spec.images, spec.whole(np.int32, spec.images.words(key.patches))
        args = shapes.leaves, shapes.pool, packed
        return Program(f"encode_{key.patches}", shapes.encode(key.patches), args, PartitionSpec(), (1,))

    def run(self, state: DeviceState, key: EncoderKey, array: np.ndarray) -> Any:
        state.pool = state.programs[key](state.encoder_leaves, state.pool, state.put(array))
        return state.pool

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[EncoderKey, DeviceCall]:
        if spec.images is None:
            return {}
        keys = [EncoderKey(patches) for patches in ready.encoders]
        return {key: encode_call(spec, Encoding(key.patches)) for key in keys}

    def heaviest(self, spec: ExecutionSpec) -> EncoderKey | None:
        return spec.table.encoder_keys()[-1] if spec.table.encoders else None

    def temporaries(self, spec: ExecutionSpec, key: EncoderKey) -> int:
        assert spec.images is not None
        return spec.images.temporaries(key.patches)

    def compile_effort(self, spec: ExecutionSpec, key: EncoderKey) -> tuple[int, int]:
        return 2, key.patches


def encode_call(spec: ExecutionSpec, encoding: Encoding) -> DeviceCall:
    """The call that encodes these parts."""
    assert spec.images is not None
    return DeviceCall(encoding.key, spec.images.pack(encoding))
