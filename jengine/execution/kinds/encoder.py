"""Encoders of images, and the pool of their embeddings; only in tables of engines that read images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jengine.execution.device_state import ALLOCATE_POOL, DeviceState
from jengine.execution.kinds.kind import DeviceCall, Kind, Program, ints
from jengine.execution.spec import ExecutionSpec
from jengine.scheduling.step_plan import Encoding
from jengine.table.program_table import EncoderKey
from jengine.table.ready_programs import ReadyPrograms


class AllocatePool(Kind[str]):
    """Allocates the pool of embeddings, all zeros."""

    name, while_serving = ALLOCATE_POOL, False

    def keys(self, spec: ExecutionSpec) -> Sequence[str]:
        return [] if spec.images is None else [self.name]

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        assert spec.images is not None
        pool = spec.images.pool

        def allocate() -> Any:
            return jnp.zeros(pool.shape, pool.dtype)

        return Program("allocate_pool", allocate, (), PartitionSpec(), by_shard=False)

    def run(self, state: DeviceState, key: str, array: None) -> None:
        state.pool = state.programs[key]()


class EncodeImages(Kind[EncoderKey]):
    """Encodes a packed bucket of patches, see `ImageShapes.pack`, into rows of the pool."""

    name, key = "encoder", EncoderKey

    def program(self, spec: ExecutionSpec, key: EncoderKey) -> Program:
        assert spec.images is not None
        shapes, packed = spec.images, ints(spec, spec.images.words(key.patches))
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
