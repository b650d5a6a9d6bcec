"""An engine shared by threads: one steps it for all, while the others sleep until they have updates."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jengine.api.outputs import LiveOutputs, blank_copy, catch_up
from jengine.base.errors import EngineDead, InvalidArgument
from jengine.base.process import check_process, return_memory, uninterrupted
from jengine.core.request import Request, RequestOutput
from jengine.core.updates import Ended, Update
from jengine.engine.limits import Limits
from jengine.engine.operations import Operation
from jengine.engine.ranks import AnyEngine
from jengine.text.tokenizer import Tokenizer

POLL_SECONDS = 0.005  # between two looks at what another thread's steps have changed


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


@dataclass(eq=False, slots=True)
class ThreadCall:
    """The requests of one call in one thread.

    Attributes:
        each_token: whether the thread waits for every token of its outputs, or only for their ends.
        outputs: in the order of the prompts. Unfinished ones change whenever a thread steps the engine.
        shown: for `each_token`, copies that change only in `SharedEngine.take` and `close`.
        news: outputs that changed and have not been returned yet, by id.
        gate: a lock on which the thread sleeps; released once to wake it.
    """

    each_token: bool = False
    outputs: list[RequestOutput] = field(default_factory=list)
    shown: dict[str, RequestOutput] = field(default_factory=dict)
    news: dict[str, RequestOutput] = field(default_factory=dict)
    gate: threading.Lock = field(default_factory=_closed_gate)

    def take(self) -> list[RequestOutput]:
        """Returns and clears the news."""
        news, self.news = list(self.news.values()), {}
        return [self.show(output) for output in news] if self.each_token else news

    def show(self, output: RequestOutput) -> RequestOutput:
        """Updates the copy of an output."""
        shown = self.shown.setdefault(output.request_id, blank_copy(output))
        catch_up(shown, output)
        return shown


class SharedEngine:
    """Serves calls of several threads in the same batches.

    One thread, the leader, steps the engine and produces text for all calls, until its own call has news.
    Then it wakes another thread to lead. The lock is held for changes of state but not during a step. Orders
    for the engine that arrive during a step run after it. Ctrl-C takes effect between steps, never within
    one.

    A failed step leaves the engine in an unknown state. Its thread gets the error; every other call, now and
    later, gets EngineDead.
    """

    def __init__(self, engine: AnyEngine, tokenizer: Tokenizer) -> None:
        self.limits: Limits = engine.limits
        self._engine: AnyEngine | None = engine
        self._live = LiveOutputs(tokenizer)
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._lock = threading.RLock()  # protects everything below
        self._changing = False  # whether the lock's holder is in the middle of a change
        self._step_lock = threading.RLock()  # held during a step
        self._stepping = False
        self._orders: deque[Callable[[], object]] = deque()  # calls to the engine, run after its current step
        self._refused: list[Ended] = []  # by the engine, not delivered yet
        self._leader: ThreadCall | None = None
        self._asleep: dict[ThreadCall, None] = {}
        self._calls: dict[str, ThreadCall] = {}  # by the id of each unfinished output
        self._given_up: deque[ThreadCall] = deque()  # to be closed at the end of the change

    @property
    def engine(self) -> AnyEngine:
        """Raises EngineDead after `quit`."""
        if self._engine is None:
            raise EngineDead("this LLM has been closed")
        return self._engine

    def check(self) -> None:
        """Raises EngineDead if the engine has stopped; JengineError in a forked process."""
        check_process(self._pid)
        if self._error is not None and self._engine is not None:
            raise EngineDead(f"the engine has stopped: {self._error!r}") from self._error
        _ = self.engine

    # --- calls; each must be closed in all cases -------------------------------------------------

    def open(self, call: ThreadCall, work: list[list[Request]]) -> None:
        """Queues requests, by prompt, that `limits` has accepted."""
        check_process(self._pid)
        with uninterrupted(), self._change():
            self.check()
            for requests in work:
                output = self._live.open(requests)
                self._calls[output.request_id] = call
                call.outputs.append(output)
                self._order(partial(self._add, requests))

    def take(self, call: ThreadCall) -> list[RequestOutput]:
        """Waits for, and returns, outputs of a call that have ended or, with `each_token`, grown since the
        last call.

        Raises:
            EngineDead: the engine has stopped, or was closed.
        """
        check_process(self._pid)
        while True:
            with uninterrupted():
                news = self._turn(call)
            if news is None:
                call.gate.acquire()
            elif news:
                return news

    def do[T](self, operation: Operation[T]) -> T:
        """Does an operation and returns the answer; see Operation.in_thread. An error fails only this
        operation.

        Raises:
            InvalidArgument: as Operation.check.
            EngineDead: the engine has stopped, or was closed.
        """
        check_process(self._pid)
        call = ThreadCall()
        answer: Future[T] = Future()

        def attempt() -> None:
            try:
                answer.set_result(self.engine.do(operation))
            except Exception as error:
                answer.set_exception(error)
            self._wake(call)

        with uninterrupted(), self._change():
            self.check()
            operation.check(self.limits)
            if not operation.in_thread:
                self._order(attempt)
        if operation.in_thread:
            attempt()
        try:
            # it runs after the current step; a thread also wakes when the engine has stopped
            while self._awaits(call, answer):
                call.gate.acquire()
        finally:
            with uninterrupted(), self._change():
                self._asleep.pop(call, None)
        return answer.result()

    def step_until(self, done: Callable[[], bool]) -> None:
        """Steps the engine, unless another thread does, until `done`, which only looks.

        Raises:
            EngineDead: the engine has stopped, or was closed.
        """
        call = ThreadCall()
        while not done():
            with uninterrupted():
                with self._change():
                    self.check()
                    if leads := self._leader is None:
                        self._leader, self._stepping = call, True
                if leads:
                    self._step()
                    with self._change():
                        self._resign(call)
            if not leads:
                time.sleep(POLL_SECONDS)

    def close(self, call: ThreadCall) -> None:
        """Aborts the unfinished requests of a call. If nothing else runs, the engine is idle afterwards."""
        if os.getpid() != self._pid:
            return
        with uninterrupted():
            with self._lock:
                self._given_up.append(call)
                # a stream was garbage-collected while this thread was in the middle of a change
                if self._changing:
                    return
                with self._change():
                    pass  # the change closes the call at its end
            while self._begin_reading(call):
                self._step()
            with self._change():
                self._resign(call)

    def quit(self) -> None:
        """Releases the engine; calls in other threads end with EngineDead. Returns when no step runs. May be
        called repeatedly."""
        if os.getpid() != self._pid:  # a forked process has nothing to end
            return
        with uninterrupted():
            with self._change():
                engine, self._engine = self._engine, None
                self._wake(*self._asleep)
            with self._step_lock:  # no other thread steps while it is closed, or afterwards
                if engine is not None:
                    engine.close()
            with self._change():
                self._orders.clear()
                self._live.ended.clear()
            return_memory()

    # --- stepping ---------------------------------------------------------------------------------

    def _turn(self, call: ThreadCall) -> list[RequestOutput] | None:
        """Returns news. Without any, runs a step, or returns None to sleep while another thread leads."""
        with self._change():
            self.check()
            if call.news:
                self._resign(call)
                return call.take()
            if self._leader not in (None, call):
                self._asleep[call] = None
                return None
            self._leader, self._stepping = call, True
        self._step()
        return []

    def _awaits(self, call: ThreadCall, answer: Future[Any]) -> bool:
        """Whether there is no answer yet. Then the call's thread must sleep."""
        with uninterrupted(), self._change():
            if answer.done():
                return False
            self.check()
            self._asleep[call] = None
            return True

    def _begin_reading(self, call: ThreadCall) -> bool:
        """Becomes the leader if there are unread steps that no request waits for. Returns whether it did."""
        with self._change():
            engine = self._engine
            if self._error is not None or engine is None or self._leader not in (None, call):
                return False
            unread = engine.has_work and not engine.has_requests
            if unread:
                self._leader, self._stepping = call, True
            return unread

    def _step(self) -> None:
        """Runs a step, and delivers its updates."""
        updates: list[Update] = []
        failure: BaseException | None = None
        try:
            with self._step_lock:
                if (engine := self._engine) is not None:
                    updates = engine.step()
        except BaseException as error:
            failure = error
        with self._change():
            self._stepping = False
            try:
                if failure is not None:
                    raise failure
                if self._engine is not None:
                    self._deliver(updates)
                    self._engine.passed_on()
            except BaseException as error:
                self._error = error
                self._orders.clear()
                self._wake(*self._asleep)
                raise

    def _deliver(self, updates: list[Update]) -> None:
        while self._orders:
            self._orders.popleft()()
        refused, self._refused = self._refused, []
        for output in self._live.take([*updates, *refused]):
            call = self._calls.get(output.request_id)
            if call is None:  # its output has ended while another sample of it was processed
                continue
            if output.finished:
                del self._calls[output.request_id]
            if call.each_token:
                self._live.settle(output.request_id)
            if output.finished or call.each_token:
                call.news[output.request_id] = output
                self._wake(call)
        self._pass_on()

    # --- within a change ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Holds the lock. At the end, closes calls that were given up, and wakes a thread if none leads."""
        with self._lock:
            self._changing = True
            try:
                yield
            finally:
                while self._given_up:
                    self._abort(self._given_up.popleft())
                if self._leader is None and self._asleep:
                    self._wake(next(iter(self._asleep)))
                self._changing = False

    def _abort(self, call: ThreadCall) -> None:
        self._asleep.pop(call, None)
        self._resign(call)
        for output in call.outputs:
            if self._calls.pop(output.request_id, None) is not None:
                self._live.abort(output.request_id)
            if call.each_token:
                call.show(output)
        self._pass_on()

    def _resign(self, call: ThreadCall) -> None:
        if self._leader is call:
            self._leader = None

    def _pass_on(self) -> None:
        """Reports ended requests to the engine."""
        for ended in self._live.ended:
            if self._engine is not None:
                self._order(partial(self._engine.end, *ended))
        self._live.ended.clear()

    def _add(self, requests: list[Request]) -> None:
        try:
            self.engine.add(*requests)
        except InvalidArgument as error:  # another thread has unloaded the adapter since it was checked
            self._refused += [Ended.of_refused(request.request_id, error) for request in requests]

    def _order(self, order: Callable[[], object]) -> None:
        if self._error is not None:
            return
        if self._stepping:
            self._orders.append(order)
        else:
            order()

    def _wake(self, *calls: ThreadCall) -> None:
        for call in calls:
            if call in self._asleep:
                del self._asleep[call]
                call.gate.release()
