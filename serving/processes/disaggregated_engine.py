"""Engine processes that compute prompts, and others that generate, used as one EngineProcess is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from jengine import (
    Disaggregated,
    EngineDead,
    FinishReason,
    Limits,
    Load,
    Operation,
    Request,
    StepTotals,
    Updates,
)
from jengine.serving.calls.model_provider import PagesInfo
from jengine.serving.processes.back_off import BackOff
from jengine.serving.processes.engine_process import Done
from jengine.serving.processes.replicated_engine import OnEnd, ReplicatedEngine
from jengine.serving.processes.restart import start_again
from jengine.serving.processes.starting import StartProgress
from jengine.serving.processes.wire import EngineInfo

OnSent = Callable[[str, EngineInfo], object]
log = logging.getLogger("jengine.serving")


class DisaggregatedEngine:
    """A jengine.Backend of engines in child processes, see `Disaggregated`. If all that compute prompts have
    ended, they are started again, while the others answer. When none of the others is left, the whole ends.

    Args:
        make_prefill: creates the engines that compute prompts, which are not started. They call the first
            argument with each prompt that they get, and the second when all have ended.
        decode: the engines that generate; not started.
        on_end: as EngineProcess's, when the last one of `decode` has ended.

    Attributes:
        makes_masks, limits: see jengine.Backend.
        info: of the first engine that generates.
        restarts: number of processes started after the first ones.
    """

    info: EngineInfo
    limits: Limits
    makes_masks = True

    def __init__(
        self,
        make_prefill: Callable[[OnSent, OnEnd], ReplicatedEngine],
        decode: Callable[[OnEnd], ReplicatedEngine],
        on_end: OnEnd | None = None,
        back_off: Callable[[], BackOff] = BackOff,
    ) -> None:
        self.on_end = on_end
        self._make_prefill, self._back_off = make_prefill, back_off()
        self.decode, self.prefill = decode(self._decode_ended), make_prefill(self._sent, self._prefill_ended)
        self._both: Disaggregated
        self._addresses: dict[str, str | None] = {}
        self._past_restarts, self._since = 0, 0.0
        self._stop = threading.Event()

    @property
    def progress(self) -> StartProgress:
        """Of the first engine's start; the others load the programs that it saves."""
        return self.decode.progress

    @property
    def pid(self) -> int | None:
        """The first process that generates."""
        return self.decode.pid

    @property
    def pids(self) -> list[int | None]:
        """The processes that generate, and then the others."""
        return [*self.decode.pids, *self.prefill.pids]

    @property
    def generated(self) -> int:
        """Number of tokens generated so far."""
        return self.decode.generated

    @property
    def restarts(self) -> int:
        return self._past_restarts + self.decode.restarts + self.prefill.restarts

    @property
    def load(self) -> Load:
        """See jengine.Backend."""
        return self._both.load

    @property
    def totals(self) -> StepTotals:
        """See jengine.Backend."""
        return self._both.totals

    def spawn(self) -> None:
        """See EngineProcess."""
        self.decode.spawn()

    def start(self) -> None:
        """As EngineProcess: the engines that generate, and then the others."""
        self.decode.start()
        try:
            self.prefill.start()
        except BaseException:
            self.decode.quit()
            raise
        self.limits, self._since = self.decode.limits, time.monotonic()
        # clients do not choose where pages come from
        self.info = msgspec.structs.replace(self.decode.info, pages=PagesInfo())
        self._both = Disaggregated(self.prefill, self.decode, self._address)

    def connect(self, deliver: Callable[[Updates], None], fail: Callable[[BaseException], None]) -> None:
        """See jengine.Backend."""
        self._both.connect(deliver, fail)

    def add(self, *requests: Request) -> None:
        """See jengine.Backend."""
        self._both.add(*requests)

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> None:
        """See jengine.Backend."""
        self._both.end(request_id, reason, stop_reason)

    def do(self, operation: Operation[object], done: Done) -> None:
        """See jengine.Backend."""
        self._both.do(operation, done)

    def quit(self, wait: bool = True) -> None:
        """See EngineProcess."""
        self._stop.set()
        for engines in (self.decode, self.prefill):
            engines.quit(wait=False)
        for engines in (self.decode, self.prefill) if wait else ():
            engines.quit()

    # --- where pages are ----------------------------------------------------------------------

    def _sent(self, request_id: str, info: EngineInfo) -> None:
        self._addresses[request_id] = info.pages.at

    def _address(self, request_id: str) -> str | None:
        return self._addresses.pop(request_id, None)

    # --- ends of engines ----------------------------------------------------------------------

    def _decode_ended(self, error: EngineDead | None) -> None:
        self._stop.set()
        self.prefill.quit(wait=False)
        if self.on_end is not None:
            self.on_end(error)

    def _prefill_ended(self, error: EngineDead | None) -> None:
        if not self._stop.is_set():
            threading.Thread(target=self._restart, args=(error,), name="prefill", daemon=True).start()

    def _restart(self, error: BaseException | None) -> None:
        """Runs in a thread until there are engines again that compute prompts, or the whole ends."""
        back = start_again(
            "engines that compute prompts",
            error,
            time.monotonic() - self._since,
            lambda: self._make_prefill(self._sent, self._prefill_ended),
            self._enter,
            back_off=self._back_off,
            stop=self._stop,
        )
        if back:
            log.info("there are engines again that compute prompts")

    def _enter(self, engines: ReplicatedEngine) -> None:
        """Gives started engines the place of those that have ended. Raises InvalidArgument if they need other
        limits.
        """
        self._both.check(engines)
        self._past_restarts += self.prefill.restarts + len(engines.pids)
        self.prefill, self._since = engines, time.monotonic()
        self._both.replace(engines)
        if self._stop.is_set():
            engines.quit(wait=False)
