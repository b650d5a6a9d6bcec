"""Results of programs that run in another process of the engine, which sends them to process 0."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import jax
import msgspec
import numpy as np

from jengine.execution.sampler import Sampled, SampledLogprobs

TYPES: tuple[type, ...] = (Sampled, SampledLogprobs)


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
