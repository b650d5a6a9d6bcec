"""Semaphores in global memory for Pallas's interpreter, which has none, and blocks of a kernel that run at
the same time.

Pallas interprets the blocks of a grid one after the other, in the order of their indices, and sees no races
between them. The blocks of a cluster run in threads of their own. So `at_once` makes a kernel's grid a
cluster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax.experimental.pallas import mosaic_gpu as plgpu

WAIT = 300  # seconds, after which a wait counts as endless


@dataclass
class Semaphores:
    """Counts, and what happened before each signal, as vector clocks; by array and index."""

    counts: dict[tuple[int, ...], int] = field(default_factory=dict)
    clocks: dict[tuple[int, ...], Any] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def signal(self, key: tuple[int, ...], clock: Any) -> None:
        with self.changed:
            self.counts[key] = self.counts.get(key, 0) + 1
            self.clocks.setdefault(key, clock.copy()).update(clock)
            self.changed.notify_all()

    def wait(self, key: tuple[int, ...], count: int, check: Callable[[], None]) -> Any:
        """The clock of what has signalled; `check` raises if another thread has failed."""
        end = time.monotonic() + WAIT
        with self.changed:
            while self.counts.get(key, 0) < count:
                check()
                if time.monotonic() > end:
                    raise TimeoutError(f"semaphore {key}: {self.counts.get(key, 0)} of {count} signals")
                self.changed.wait(0.1)
            self.counts[key] -= count
            return self.clocks[key].copy()


SEMAPHORES = Semaphores()  # one, since programs that have been traced refer to it


@contextmanager
def interpreted() -> Iterator[None]:
    """Interprets `pallas_kernels.mosaic.semaphores`. In the end all semaphores must be zero."""
    SEMAPHORES.counts.clear()
    SEMAPHORES.clocks.clear()

    def operation(self: Any, eqn: Any, token: Any, get_invals: Callable[[], Any]) -> Any:
        name = eqn.params["mgpu_fn"].__name__
        assert name in ("semaphore_signal", "semaphore_wait"), f"{name} has no interpreted form"
        count = eqn.params["pytree_args"].num_leaves
        (array, *wanted), indices = get_invals()[:count], get_invals()[count:]
        function = partial(_operation, name)
        where = {"thread": self.thread, "array": array, "indices": indices, "wanted": wanted}
        return callback.io_callback(function, gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token, **where), []

    with mock.patch.object(jaxpr_interpret.JaxprInterpreter, "_interpret_inline_mgpu_p", operation):
        yield
    assert not any(SEMAPHORES.counts.values()), "a semaphore is not zero after the kernels"


@gpu_callbacks.fail_on_exception
def _operation(name: str, *, token: Any, thread: Any, array: Any, indices: Any, wanted: Any) -> Any:
    memory = gpu_callbacks._get_shared_memory()
    key = *np.asarray(array).tolist(), *(int(index) for index in indices)
    if name == "semaphore_signal":
        SEMAPHORES.signal(key, memory.incr_clock(thread))
    else:
        clock = SEMAPHORES.wait(key, int(wanted[0]), memory.check_failed)
        with memory.lock:
            memory.incr_clock(thread, take_lock=False)
            memory.clocks[thread].update(clock)
    return token


@contextmanager
def at_once() -> Iterator[None]:
    """Runs all blocks of kernels that are traced in this context at the same time, so that races between them
    are found.
    """
    kernel = plgpu.kernel

    def as_cluster(*args: Any, grid: tuple[int, ...], grid_names: tuple[str, ...], **how: Any) -> Any:
        return kernel(*args, cluster=grid, cluster_names=grid_names, **how)

    with mock.patch.object(plgpu, "kernel", as_cluster):
        yield
