"""Engines that serve AsyncLLM's requests: in a thread of this process, or elsewhere."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from jengine.base.errors import InvalidArgument
from jengine.core.request import FinishReason, Request
from jengine.core.updates import Ended, Load, Update
from jengine.engine.limits import Limits
from jengine.engine.operations import Operation
from jengine.insight.recording.records import StepTotals

if TYPE_CHECKING:
    from jengine.engine.ranks import AnyEngine  # imports jax

IDLE_SECONDS = 1.0  # after which an idle engine looks for programs that have become ready
Updates = Sequence[Update]
Done = Callable[[Any, Exception | None], object]  # takes an operation's answer, or its error


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
        """Starts the engine; called once. Any thread may call both; `fail` once at most, and last."""

    def add(self, *requests: Request) -> None:
        """Queues a prompt's requests, which `limits` has accepted.

        Raises:
            InvalidArgument: they are too large for this backend. Nothing has been queued.
        """

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> None:
        """Ends a request, if it is unfinished."""

    def do(self, operation: Operation[Any], done: Done) -> None:
        """Does an operation, which its `check` has accepted, and calls `done` once with the answer or the
        error.

        `done` may be called in any thread. It is not called if the engine ends first.
        """

    def quit(self, wait: bool = True) -> None:
        """Ends the engine, and waits until it has ended. May be called repeatedly."""


def run_engine(
    engine: AnyEngine, take_orders: Callable[[bool], bool], deliver: Callable[[Updates], None]
) -> None:
    """The engine's loop: takes orders, steps, and delivers updates until `take_orders` returns False.

    take_orders(wait) executes pending orders. With `wait`, the engine has no work, and it waits for an order.
    """
    while take_orders(not (engine.has_work or engine.has_unused_programs)):
        updates = engine.step()
        if updates:
            deliver(updates)
        engine.passed_on()
    while engine.has_work and not engine.has_requests:
        engine.step()  # updates are no longer needed, but dispatched steps must be read
    engine.close()


def run_operation(
    engine: AnyEngine, operation: Operation[Any], order: Callable[[Callable[[], object]], object], done: Done
) -> None:
    """Does an operation between two steps of the engine, or in a separate thread. An error fails only this
    operation.

    Args:
        order: makes the engine's loop call a function between two steps. `done` is called in the loop, too.
    """

    def attempt() -> Callable[[], object]:
        try:
            return partial(done, engine.do(operation), None)
        except Exception as error:
            return partial(done, None, error)

    if operation.in_thread:
        threading.Thread(target=lambda: order(attempt()), name=type(operation).__name__, daemon=True).start()
    else:
        order(lambda: attempt()())


class EngineThread:
    """An engine in a thread of this process. It handles tokens only."""

    makes_masks = False

    def __init__(self, engine: AnyEngine) -> None:
        self.engine, self.limits = engine, engine.limits
        # functions to call in the thread; None ends it
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._deliver: Callable[[Updates], None] = lambda updates: None

    @property
    def load(self) -> Load:
        return self.engine.load

    @property
    def totals(self) -> StepTotals:
        return self.engine.totals()

    def connect(self, deliver: Callable[[Updates], None], fail: Callable[[BaseException], None]) -> None:
        self._deliver = deliver

        def run() -> None:
            try:
                run_engine(self.engine, self._take_orders, deliver)
            except BaseException as error:  # of any kind, since callers must not wait forever
                fail(error)

        self._thread = threading.Thread(target=run, name="jengine", daemon=True)
        self._thread.start()

    def add(self, *requests: Request) -> None:
        self._inbox.put(partial(self._add, requests))

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> None:
        self._inbox.put(lambda: self.engine.end(request_id, reason, stop_reason))

    def do(self, operation: Operation[Any], done: Done) -> None:
        run_operation(self.engine, operation, self._inbox.put, done)

    def quit(self, wait: bool = True) -> None:
        self._inbox.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _add(self, requests: tuple[Request, ...]) -> None:
        try:
            self.engine.add(*requests)
        except InvalidArgument as error:
            self._deliver([Ended.of_refused(request.request_id, error) for request in requests])

    def _take_orders(self, wait: bool) -> bool:
        while True:
            try:
                order = self._inbox.get(wait, IDLE_SECONDS)
            except queue.Empty:
                if not wait or self.engine.has_unused_programs:
                    return True
                continue
            if order is None:
                return False
            order()
            wait = not (self.engine.has_work or self.engine.has_unused_programs)
