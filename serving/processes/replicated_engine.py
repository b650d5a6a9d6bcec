"""Several engine processes of one model, used as one EngineProcess is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from jengine import (
    EngineDead,
    FinishReason,
    Limits,
    Load,
    Operation,
    Replicas,
    Request,
    StepTotals,
    Updates,
)
from jengine.serving.processes.back_off import BackOff
from jengine.serving.processes.engine_process import Done, EngineProcess
from jengine.serving.processes.restart import start_again
from jengine.serving.processes.starting import StartProgress
from jengine.serving.processes.wire import EngineInfo

OnEnd = Callable[[EngineDead | None], None]
log = logging.getLogger("jengine.serving")


class ReplicatedEngine:
    """A jengine.Backend of replicas in child processes, see `Replicas`. One that ends is started again, while
    the others answer. When none is left, the whole ends.

    Args:
        make: creates the process of a replica that is not started, and calls its second argument when that
            ends; see EngineProcess.
        count: number of replicas.
        on_end: as EngineProcess's, when the last one has ended.
        on_sent: called when a replica gets a prompt, with its first request's id and the replica's info.

    Attributes:
        makes_masks, limits: see jengine.Backend.
        info: of the first replica.
        restarts: number of replicas started after the first ones.
    """

    info: EngineInfo
    limits: Limits
    makes_masks = True

    def __init__(
        self,
        make: Callable[[int, OnEnd], EngineProcess],
        count: int,
        on_end: OnEnd | None = None,
        back_off: Callable[[], BackOff] = BackOff,
        on_sent: Callable[[str, EngineInfo], object] = lambda request_id, info: None,
    ) -> None:
        self._on_sent = on_sent
        self.on_end, self._make, self.restarts = on_end, make, 0
        self._processes = [make(i, partial(self._ended, i)) for i in range(count)]
        self._back_offs = [back_off() for _ in range(count)]
        self._since = [0.0] * count  # when each was ready
        self._past_generated = 0  # tokens of processes that were replaced
        self._replicas: Replicas
        self._lock = threading.Lock()  # protects the following
        self._running = set[int]()
        self._stop = threading.Event()

    @property
    def progress(self) -> StartProgress:
        """Of the first replica's start; the others load the programs that it saves."""
        return self._processes[0].progress

    @property
    def pid(self) -> int | None:
        """The first replica's process."""
        return self._processes[0].pid

    @property
    def pids(self) -> list[int | None]:
        """The replicas' processes."""
        return [process.pid for process in self._processes]

    @property
    def generated(self) -> int:
        """Number of tokens generated so far."""
        return self._past_generated + sum(process.generated for process in self._processes)

    @property
    def load(self) -> Load:
        """See jengine.Backend."""
        return self._replicas.load

    @property
    def totals(self) -> StepTotals:
        """See jengine.Backend."""
        return self._replicas.totals

    def spawn(self) -> None:
        """See EngineProcess."""
        self._processes[0].spawn()

    def start(self) -> None:
        """As EngineProcess: the first replica, and then the others at the same time."""
        first, *others = self._processes
        first.start()
        with ThreadPoolExecutor(len(others) or 1, "replica-start") as pool:
            for _ in pool.map(EngineProcess.start, others):
                pass
        self.info, self.limits = first.info, first.limits
        self._replicas = Replicas(self._processes, on_sent=self._sent)
        self._running = {*range(len(self._processes))}
        self._since = [time.monotonic()] * len(self._processes)

    def connect(self, deliver: Callable[[Updates], None], fail: Callable[[BaseException], None]) -> None:
        """See jengine.Backend."""
        self._replicas.connect(deliver, fail)

    def add(self, *requests: Request) -> None:
        """See jengine.Backend."""
        self._replicas.add(*requests)

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> None:
        """See jengine.Backend."""
        self._replicas.end(request_id, reason, stop_reason)

    def do(self, operation: Operation[object], done: Done) -> None:
        """See jengine.Backend."""
        self._replicas.do(operation, done)

    def quit(self, wait: bool = True) -> None:
        """See EngineProcess."""
        self._stop.set()
        for process in self._processes:
            process.quit(wait=False)
        for process in self._processes if wait else ():
            process.quit()

    def _sent(self, request_id: str, index: int) -> None:
        self._on_sent(request_id, self._processes[index].info)

    # --- ends of replicas ---------------------------------------------------------------------

    def _ended(self, index: int, error: EngineDead | None) -> None:
        with self._lock:
            self._running.discard(index)
            last = not self._running
            if last:
                self._stop.set()
        if last:
            if self.on_end is not None:
                self.on_end(error)
        elif not self._stop.is_set():
            threading.Thread(
                target=self._restart, args=(index, error), name=f"replica-{index}", daemon=True
            ).start()

    def _restart(self, index: int, error: BaseException | None) -> None:
        """Runs in a thread until the replica is back, or the whole ends."""
        back = start_again(
            f"replica {index}",
            error,
            time.monotonic() - self._since[index],
            lambda: self._make(index, partial(self._ended, index)),
            partial(self._enter, index),
            back_off=self._back_offs[index],
            stop=self._stop,
        )
        if back:
            self.restarts += 1
            log.info("replica %d answers again", index)

    def _enter(self, index: int, process: EngineProcess) -> None:
        """Gives a started process the place of one that has ended. Raises InvalidArgument if its limits are
        not those of the others.
        """
        self._replicas.check(process)
        with self._lock:
            self._past_generated += self._processes[index].generated
            self._processes[index], self._since[index] = process, time.monotonic()
            self._running.add(index)
        self._replicas.replace(index, process)
        if self._stop.is_set():
            process.quit(wait=False)
