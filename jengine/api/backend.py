"""What answers AsyncLLM's requests: an engine in a thread of this process, or one elsewhere."""

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
    """An engine, as `run_engine` uses it."""

    @property
    def limits(self) -> Limits: ...

    @property
    def load(self) -> Load: ...

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step unread."""

    @property
    def has_requests(self) -> bool:
        """Whether a request is unfinished."""

    def add(self, *requests: Request) -> object:
        """Queue a prompt's requests."""

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> object:
        """Abort a request. Unknown ids are ignored."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; requests that run keep theirs. Returns whether it was done."""

    def set_strategy(self, strategy: StrategyName) -> object:
        """Compose steps for this from the next one on; `limits` has let it pass."""

    def step(self) -> Updates:
        """One turn of the loop."""

    def passed_on(self) -> None:
        """What the last step returned was passed on."""

    def trace(self, seconds: float | None = None) -> Trace:
        """What it did in the last so many seconds, or in all that are kept."""

    def totals(self) -> StepTotals:
        """What all steps since the start add up to. May be asked from any thread."""

    def close(self) -> None:
        """It will not be used any more."""


class Backend(Protocol):
    """A running engine, as AsyncLLM uses it. Calls return at once; what they ask for is done in order.

    Attributes:
        makes_masks: whether it makes requests' token masks itself; else they come with the requests.
    """

    limits: Limits
    makes_masks: bool

    @property
    def load(self) -> Load:
        """As last heard."""

    @property
    def totals(self) -> StepTotals:
        """Of its steps, as last heard; every second while it runs."""

    def connect(self, deliver: Callable[[Updates], None], fail: Callable[[BaseException], None]) -> None:
        """Start; called once. Both functions may be called from any thread; fail at most once, and nothing after it."""

    def add(self, *requests: Request) -> None:
        """Queue a prompt's requests, which `limits` lets pass.

        Raises:
            InvalidArgument: they are larger than this backend takes. Nothing has been queued then.
        """

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> None:
        """Take a request out, if it is still there."""

    def reset_prefix_cache(self, done: Callable[[bool], None]) -> None:
        """Forget all cached pages. Then `done` is called, in any thread, with whether that was done; not where the engine ends before."""

    def trace(self, seconds: float | None, done: Callable[[Trace], None]) -> None:
        """`done` is called as for reset_prefix_cache, with what the engine did in the last so many seconds, or in all that are kept."""

    def profile(self, options: ProfileOptions, folder: Path, done: Callable[[str], None]) -> None:
        """`done` is called as for reset_prefix_cache, once the engine's process has left its profile in this folder, see capture_process;
        with why it has not, or "". An engine in this process leaves none."""

    def set_strategy(self, strategy: StrategyName) -> None:
        """Compose steps for this, which `limits` lets pass."""

    def quit(self, wait: bool = True) -> None:
        """End the engine, and wait until it has ended. May be called again."""


def run_engine(engine: Steps, take_orders: Callable[[bool], bool], deliver: Callable[[Updates], None]) -> None:
    """The engine's life: take orders, step, hand over what came of it, until take_orders says that this was the end.

    take_orders(wait) does what has been asked so far; with `wait`, there is nothing to run and it waits for something to do.
    """
    while take_orders(not engine.has_work):
        updates = engine.step()
        if updates:
            deliver(updates)
        engine.passed_on()
    while engine.has_work and not engine.has_requests:
        engine.step()  # nobody waits any more, but what was dispatched is read
    engine.close()


class EngineThread:
    """An engine in a thread of this process, which knows tokens only."""

    makes_masks = False

    def __init__(self, engine: Steps) -> None:
        self.engine, self.limits = engine, engine.limits
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()  # what the thread shall do; None ends it
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
            except BaseException as error:  # of any kind: callers must not wait for ever
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
