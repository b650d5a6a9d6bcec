"""Engine processes that serve as one, used as one EngineProcess is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from jengine import EngineDead
from jengine.serving.calls.model_provider import PagesInfo
from jengine.serving.processes.engine_process import EngineProcess
from jengine.serving.processes.starting import StartProgress
from jengine.serving.processes.wire import EngineInfo
from jengine.spi import BackOff, Fleet

OnEnd = Callable[[EngineDead | None], None]


class EngineFleet:
    """A jengine.Fleet of engines in child processes. One that ends is started again while the others answer.

    Args:
        make: creates the process of an engine that is not started, and calls its second argument when that
            ends; see EngineProcess. The first argument is the engine's index in [*decode, *prefill].
        decode, prefill: numbers of engines that generate, and that compute prompts for them.
        on_end: as EngineProcess's, when the last engine that generates has ended.
        back_off: see Fleet.

    Attributes:
        info: of the first engine; available when `start` has returned.
    """

    info: EngineInfo

    def __init__(
        self,
        make: Callable[[int, OnEnd], EngineProcess],
        decode: int,
        prefill: int = 0,
        on_end: OnEnd | None = None,
        back_off: Callable[[], BackOff] = BackOff,
    ) -> None:
        self.on_end, self.back_off = on_end, back_off
        self._make, self._decode = make, decode
        self._first = [make(i, partial(self._ended, i)) for i in range(decode + prefill)]
        self._fleet: Fleet[EngineProcess] | None = None
        self._lock, self._over = threading.Lock(), False

    @property
    def backend(self) -> Fleet[EngineProcess]:
        """What answers, when `start` has returned."""
        assert self._fleet is not None, "the engines have not started"
        return self._fleet

    @property
    def processes(self) -> list[EngineProcess]:
        """The engines' processes: those that generate, and then the others."""
        return self._first if self._fleet is None else self._fleet.backends

    @property
    def progress(self) -> StartProgress:
        """Progress of the first engine's start; the others load the programs that it saves."""
        return self._first[0].progress

    @property
    def pid(self) -> int | None:
        """The first engine's process."""
        return self.processes[0].pid

    @property
    def generated(self) -> int:
        """Number of tokens generated so far."""
        return self.backend.generated

    @property
    def restarts(self) -> int:
        """Number of engines started after the first ones."""
        return self.backend.restarts

    def spawn(self) -> None:
        """Starts the first engine's process; see EngineProcess."""
        self._first[0].spawn()

    def start(self) -> None:
        """Starts the first engine, and then the others at the same time; as EngineProcess's."""
        first, *others = self._first
        first.start()
        with ThreadPoolExecutor(len(others) or 1, "engine-start") as pool:
            for _ in pool.map(EngineProcess.start, others):
                pass
        self.info = first.info
        if len(self._first) > self._decode:  # clients do not choose where pages come from
            self.info = msgspec.structs.replace(first.info, pages=PagesInfo())
        self._fleet = Fleet(
            self._first[: self._decode],
            self._first[self._decode :],
            address=lambda process: process.info.pages.at,
            make=self._started,
            back_off=self.back_off,
        )

    def quit(self, wait: bool = True) -> None:
        """Ends all engines; as EngineProcess's."""
        if self._fleet is not None:
            self._fleet.quit(wait)
            return
        for process in self._first:
            process.quit(wait=False)
        for process in self._first if wait else ():
            process.quit()

    def _started(self, index: int) -> EngineProcess:
        process = self._make(index, partial(self._ended, index))
        process.start()
        return process

    def _ended(self, index: int, error: EngineDead | None) -> None:
        """A process has ended, after its callers were told; without an error, since all were to quit."""
        with self._lock:
            if index >= self._decode or self._over or (error is not None and self.backend.lives):
                return
            self._over = True
        if self.on_end is not None:
            self.on_end(error)
