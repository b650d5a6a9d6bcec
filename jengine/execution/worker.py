"""Executes calls on the devices, in the engine's process or in another one of the same engine."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from jengine.execution.device_state import DeviceState
from jengine.execution.kinds import DeviceCall, call_kind, named
from jengine.execution.memory import device_bytes
from jengine.execution.programs import Programs
from jengine.execution.spec import ExecutionSpec
from jengine.models import Params


def encode(call: DeviceCall) -> bytes:
    """A call for other processes."""
    array = None if call.array is None else (call.array.dtype.str, call.array.shape, call.array.tobytes())
    return msgspec.msgpack.encode((call_kind(call.key).name, call.key, array, call.overtakes))


def decode(frame: bytes) -> DeviceCall:
    """The call of a frame."""
    name, key, array, overtakes = msgspec.msgpack.decode(frame)
    return DeviceCall(
        msgspec.convert(key, named(name).key),
        None if array is None else np.frombuffer(array[2], array[0]).reshape(array[1]),
        overtakes,
    )


class Worker:
    """Programs, and the state of the devices that they change.

    Args:
        draft: parameters of the draft model, if there is one.
        encoder: those of the images' encoder, if there is one.
    """

    def __init__(
        self,
        spec: ExecutionSpec,
        programs: Programs,
        params: Params,
        draft: Params = None,
        encoder: Params = None,
    ) -> None:
        self.spec, self.programs = spec, programs
        self.state = DeviceState(spec, programs, params, draft, encoder)

    def execute(self, call: DeviceCall) -> Any:
        """Executes a call without waiting for its result; see `CallKind.run`."""
        return call_kind(call.key).run(self.state, call.key, call.array)

    def await_samples(self, overtakes: int) -> None:
        """Does nothing: a device runs its programs in order."""

    @property
    def caches(self) -> list[Any]:
        """The cache's arrays."""
        return [self.state.cache]

    def memory_parts(self) -> dict[str, int]:
        """Bytes on this process's devices, by use."""
        devices, state = len(self.spec.mesh.local_devices), self.state
        parts = {
            "weights": (state.leaves, state.draft_only_leaves, state.stacks, state.encoder_leaves),
            "cache": state.cache,
            "slots and counts": (state.slots, state.counts),
        }
        if state.pool is not None:
            parts["embeddings of images"] = state.pool
        sizes = {name: devices * device_bytes(tree) for name, tree in parts.items()}
        memory = [*self.programs.memory.values()]
        return {
            **sizes,
            "programs' code": sum([program.code for program in memory]),
            "programs' temporaries, of the largest": devices
            * max([program.working for program in memory], default=0),
        }
