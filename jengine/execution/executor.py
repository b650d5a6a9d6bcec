"""What executes the calls of an engine in this process (a worker, or the stages of a pipeline), and the
results that it returns.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import msgspec
import numpy as np

from jengine.execution.kinds import DeviceCall
from jengine.execution.pipeline import Pipeline, StagePrograms
from jengine.execution.programs import Programs
from jengine.execution.sampler import Sampled, SampledLogprobs
from jengine.execution.spec import ExecutionSpec
from jengine.execution.worker import Worker
from jengine.models import Params

TYPES: tuple[type, ...] = (Sampled, SampledLogprobs)


class Executor(Protocol):
    """What runs calls: a worker, or the stages of a pipeline."""

    spec: ExecutionSpec
    programs: Any

    def execute(self, call: DeviceCall) -> Any: ...

    def await_samples(self, overtakes: int) -> None: ...

    @property
    def caches(self) -> list[Any]: ...

    def memory_parts(self) -> dict[str, int]: ...


def make_worker(
    spec: ExecutionSpec,
    programs: Programs | StagePrograms,
    params: Sequence[Params],
    draft: Params = None,
    encoder: Params = None,
) -> Executor:
    """Args:
    params: of each stage.
    """
    if not isinstance(programs, StagePrograms):
        (whole,) = params
        return Worker(spec, programs, whole, draft, encoder)
    parts = zip(spec.local_stages, programs.stages, params, strict=True)
    return as_one(spec, programs, [Worker(*part) for part in parts])


def as_one(
    spec: ExecutionSpec, programs: Programs | StagePrograms, workers: Sequence[Worker]
) -> Worker | Pipeline:
    """The workers of all stages, or of the only one, as one."""
    if isinstance(programs, StagePrograms):
        return Pipeline(spec, programs, workers)
    (whole,) = workers
    return whole


def by_stage(programs: Programs | StagePrograms) -> Sequence[Programs]:
    """The programs of each stage, or of the only one."""
    return programs.stages if isinstance(programs, StagePrograms) else [programs]


class Remote:
    """The result of a call, by the call's number. A leaf in the place of arrays."""

    def __init__(self, number: int, frames: dict[int, bytes]) -> None:
        self._number, self._frames = number, frames

    def is_ready(self) -> bool:
        return self._number in self._frames

    def value(self) -> Any:
        """The arrays. They must be ready; may be called once."""
        return decode_result(self._frames.pop(self._number))


def on_host(leaf: Any) -> Any:
    """A result's arrays, as numpy arrays."""
    return leaf.value() if isinstance(leaf, Remote) else np.asarray(leaf)


class ResultSender:
    """Sends results in a thread, in order, as soon as each is ready."""

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        self._send = send
        self._waiting: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="results", daemon=True).start()

    def put(self, number: int, result: Any) -> None:
        self._waiting.put((number, result))

    def _run(self) -> None:
        while True:
            number, result = self._waiting.get()
            try:
                frame = encode_result(result)
            except jax.errors.JaxRuntimeError:
                return  # another process has ended, as process 0 will notice
            self._send(number, frame)


def encode_result(result: Any) -> bytes:
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(result)]
    kind = next((i for i, cls in enumerate(TYPES) if isinstance(result, cls)), -1)
    parts = [(array.dtype.str, array.shape, array.tobytes()) for array in arrays]
    return msgspec.msgpack.encode((kind, parts))


def decode_result(frame: bytes) -> Any:
    kind, parts = msgspec.msgpack.decode(frame)
    arrays = [np.frombuffer(data, dtype).reshape(shape) for dtype, shape, data in parts]
    return arrays[0] if kind < 0 else TYPES[kind](*arrays)
