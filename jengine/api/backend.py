"""Engines that serve AsyncLLM's requests: in a thread of this process, or elsewhere."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from jengine.engine.limits import Limits
from jengine.observe.totals import StepTotals
from jengine.observe.trace import Trace
from jengine.profiling.data import ProfileOptions
from jengine.request import FinishReason, Request
from jengine.scheduling.options import StrategyName
from jengine.updates import Load, Update

Updates = Sequence[Update]


class Steps(Protocol):
    """The interface of an engine for `run_engine`."""

    @property
    def limits(self) -> Limits: ...

    @property
    def load(self) -> Load: ...

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step has not been read."""

    @property
    def has_requests(self) -> bool:
        """Whether a request is unfinished."""

    def add(self, *requests: Request) -> object:
        """Queues a prompt's requests."""

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> object:
        """Ends a request. Unknown ids are ignored."""

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached pages; running requests keep theirs. Returns whether it was done."""

    def set_strategy(self, strategy: StrategyName) -> object:
        """Takes effect at the next step. `limits` must have accepted the strategy."""

    def step(self) -> Updates:
        """Runs one iteration of the loop."""

    def passed_on(self) -> None:
        """The last step's updates have been delivered."""

    def trace(self, seconds: float | None = None) -> Trace:
        """Records of the last `seconds` seconds, or all that are kept."""

    def totals(self) -> StepTotals:
        """Totals over all steps since the start. Thread-safe."""

    def close(self) -> None:
        """Releases the engine, which is not used any more."""


class Backend(Protocol):
    """The interface of a running engine for AsyncLLM. Calls return immediately and take effect in order.

    Attributes:
        makes_masks: whether it creates requests' token masks itself; otherwise requests must include them.
    """

    limits: Limits
    makes_masks: bool

    @property
    def load(self) -> Load:
        """The last reported load."""

    @property
    def totals(self) -> StepTotals:
        """The last reported totals over all steps, updated every second while it runs."""

    def connect(self, deliver: Callable[[Updates], None], fail: Callable[[BaseException], None]) -> None:
        """Starts the engine; called once. Both functions may be called from any thread; `fail` at most once, as
        the last call."""

    def add(self, *requests: Request) -> None:
        """Queues a prompt's requests, which `limits` has accepted.

        Raises:
            InvalidArgument: they are too large for this backend. Nothing has been queued.
        """

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> None:
        """Ends a request, if it is unfinished."""

    def reset_prefix_cache(self, done: Callable[[bool], None]) -> None:
        """Forgets all cached pages, and calls `done` with whether that was done.

        `done` may be called in any thread. It is not called if the engine ends first.
        """

    def trace(self, seconds: float | None, done: Callable[[Trace], None]) -> None:
        """Calls `done`, as in reset_prefix_cache, with records of the last `seconds` seconds or all that are kept."""

    def profile(self, options: ProfileOptions, folder: Path, done: Callable[[str], None]) -> None:
        """Makes the engine's process write its profile to this folder; see capture_process.

        Then calls `done`, as in reset_prefix_cache, with the reason for a failure or "". An engine in this
        process writes none.
        """

    def set_strategy(self, strategy: StrategyName) -> None:
        """Changes the strategy to one that `limits` accepts."""

    def quit(self, wait: bool = True) -> None:
        """Ends the engine, and waits until it has ended. May be called repeatedly."""


def run_engine(engine: Steps, take_orders: Callable[[bool], bool], deliver: Callable[[Updates], None]) -> None:
    """The engine's loop: takes orders, steps, and delivers updates until `take_orders` returns False.

    take_orders(wait) executes pending orders. With `wait`, the engine has no work, and it waits for an order.
    """
    while take_orders(not engine.has_work):
        updates = engine.step()
        if updates:
            deliver(updates)
        engine.passed_on()
    while engine.has_work and not engine.has_requests:
        engine.step()  # updates are no longer needed, but dispatched steps must be read
    engine.close()


class EngineThread:
    """An engine in a thread of this process. It handles tokens only."""

    makes_masks = False

    def __init__(self, engine: Steps) -> None:
        self.engine, self.limits = engine, engine.limits
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()  # functions to call in the thread; None ends it
        self._thread: threading.Thread | None = None

    @property
    def load(self) -> Load:
        return self.engine.load

    @property
    def totals(self) -> StepTotals:
        return self.engine.totals()

    def connect(self, deliver: Callable[[Updates], None], fail: Callable[[BaseException], None]) -> None:
        def run() -> None:
            try:
                run_engine(self.engine, self._take_orders, deliver)
            except BaseException as error:  # of any kind, since callers must not wait forever
                fail(error)

        self._thread = threading.Thread(target=run, name="jengine", daemon=True)
        self._thread.start()

    def add(self, *requests: Request) -> None:
        self._inbox.put(lambda: self.engine.add(*requests))

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> None:
        self._inbox.put(lambda: self.engine.end(request_id, reason, stop_reason))

    def reset_prefix_cache(self, done: Callable[[bool], None]) -> None:
        self._inbox.put(lambda: done(self.engine.reset_prefix_cache()))

    def trace(self, seconds: float | None, done: Callable[[Trace], None]) -> None:
        self._inbox.put(lambda: done(self.engine.trace(seconds)))

    def profile(self, options: ProfileOptions, folder: Path, done: Callable[[str], None]) -> None:
        done("")

    def set_strategy(self, strategy: StrategyName) -> None:
        self._inbox.put(lambda: self.engine.set_strategy(strategy))

    def quit(self, wait: bool = True) -> None:
        self._inbox.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _take_orders(self, wait: bool) -> bool:
        while True:
            try:
                order = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            wait = not self.engine.has_work
