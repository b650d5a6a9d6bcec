"""An engine that several threads use at once: one of them steps it for all, the others sleep until something comes for them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from jengine.api.outputs import LiveOutputs, blank_copy, catch_up
from jengine.engine.engine import Engine
from jengine.engine.limits import Limits
from jengine.errors import EngineDead
from jengine.interrupts import uninterrupted
from jengine.process import check_process
from jengine.request import Request, RequestOutput
from jengine.text.tokenizer import Tokenizer
from jengine.updates import Update


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


@dataclass(eq=False, slots=True)
class Call:
    """The requests of one call in one thread.

    Attributes:
        each_token: whether the thread waits for every token of its outputs, or for their ends.
        outputs: in the order of the prompts. Unfinished ones change whenever some thread steps the engine.
        shown: of `each_token`, copies that change only in `SharedEngine.take` and `close`.
        news: the outputs to report, by id.
        gate: the thread sleeps by acquiring it; released once to wake it.
    """

    each_token: bool = False
    outputs: list[RequestOutput] = field(default_factory=list)
    shown: dict[str, RequestOutput] = field(default_factory=dict)
    news: dict[str, RequestOutput] = field(default_factory=dict)
    gate: threading.Lock = field(default_factory=_closed_gate)

    def take(self) -> list[RequestOutput]:
        """The news; empties it."""
        news, self.news = list(self.news.values()), {}
        return [self.show(output) for output in news] if self.each_token else news

    def show(self, output: RequestOutput) -> RequestOutput:
        """Bring the copy of an output up to date."""
        shown = self.shown.setdefault(output.request_id, blank_copy(output))
        catch_up(shown, output)
        return shown


class SharedEngine:
    """Calls of several threads, answered in the same batches.

    The thread that leads steps the engine, makes text of what comes, for all calls, and leads until something has come for its
    own. Then it wakes another one. The lock is held for changes of state but not during a step: what threads ask of the engine
    meanwhile is done after it. Ctrl-C comes between steps, never within one.

    A step that fails leaves the engine in an unknown state: its thread gets the error, and every other call, now and later, an
    EngineDead.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.limits: Limits = engine.limits
        self._engine: Engine | None = engine
        self._live = LiveOutputs(tokenizer)
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._lock = threading.RLock()  # of all that follows
        self._changing = False  # the thread that has the lock is in the midst of a change
        self._step_lock = threading.RLock()  # held during a step
        self._stepping = False
        self._orders: deque[Callable[[], object]] = deque()  # for the engine, once its step has ended
        self._leader: Call | None = None
        self._asleep: dict[Call, None] = {}
        self._calls: dict[str, Call] = {}  # by the id of each unfinished output
        self._given_up: deque[Call] = deque()  # to be closed at the end of the change

    @property
    def engine(self) -> Engine:
        """Raises EngineDead after `quit`."""
        if self._engine is None:
            raise EngineDead("this LLM has been closed")
        return self._engine

    def check(self) -> None:
        """Raises EngineDead unless calls can be answered; JengineError in a forked process."""
        check_process(self._pid)
        if self._error is not None and self._engine is not None:
            raise EngineDead(f"the engine has stopped: {self._error!r}") from self._error
        _ = self.engine

    # --- calls; each must be closed, whatever happens -----------------------------------------------

    def open(self, call: Call, work: list[list[Request]]) -> None:
        """Queue requests, by prompt, which `limits` lets pass."""
        check_process(self._pid)
        with uninterrupted(), self._change():
            self.check()
            for requests in work:
                output = self._live.open(requests)
                self._calls[output.request_id] = call
                call.outputs.append(output)
                self._order(partial(self.engine.add, *requests))

    def take(self, call: Call) -> list[RequestOutput]:
        """Outputs of a call that have ended since the last time, or that have grown, for `each_token`. Waits until there are some.

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

    def set_strategy(self, strategy: str) -> None:
        """From the next step on.

        Raises:
            InvalidArgument: as Limits.check_strategy.
            EngineDead: the engine has stopped, or was closed.
        """
        check_process(self._pid)
        with uninterrupted(), self._change():
            self.check()
            self._order(partial(self.engine.set_strategy, self.limits.check_strategy(strategy)))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages, between two steps; requests that run keep theirs. Returns whether it was done.

        Raises:
            EngineDead: the engine has stopped, or was closed.
        """
        check_process(self._pid)
        call = Call()
        results: list[bool] = []

        def reset() -> None:
            results.append(self.engine.reset_prefix_cache())
            self._wake(call)

        with uninterrupted(), self._change():
            self.check()
            self._order(reset)
            if not results:
                self._asleep[call] = None
        while not results:  # it is done after the step that runs now; a thread also wakes when the engine has stopped
            call.gate.acquire()
            with uninterrupted(), self._change():
                if not results:
                    self.check()
                    self._asleep[call] = None
        return results[0]

    def close(self, call: Call) -> None:
        """Abort what is unfinished of a call. Where nothing else runs, the engine is idle afterwards."""
        if os.getpid() != self._pid:
            return
        with uninterrupted():
            with self._lock:
                self._given_up.append(call)
                if self._changing:  # a stream was collected as garbage in the midst of this thread's change
                    return
                with self._change():
                    pass  # it ends there
            while self._begin_reading(call):
                self._step()
            with self._change():
                self._resign(call)

    def quit(self) -> None:
        """Let go of the engine; calls in other threads end with EngineDead. Returns when no step runs. May be called again."""
        if os.getpid() != self._pid:  # a forked process has nothing to end
            return
        with uninterrupted():
            with self._change():
                if self._engine is not None:
                    self._engine.close()
                self._engine = None
                self._wake(*self._asleep)
            with self._step_lock:
                pass
            with self._change():
                self._orders.clear()
                self._live.ended.clear()

    # --- their work ---------------------------------------------------------------------------------

    def _turn(self, call: Call) -> list[RequestOutput] | None:
        """The news; where there are none, step once, or return None to sleep while another thread leads."""
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

    def _begin_reading(self, call: Call) -> bool:
        """Whether steps are unread that no request waits for. Leads then."""
        with self._change():
            engine = self._engine
            if self._error is not None or engine is None or self._leader not in (None, call):
                return False
            unread = engine.has_work and not engine.has_requests
            if unread:
                self._leader, self._stepping = call, True
            return unread

    def _step(self) -> None:
        """Step the engine, and pass on what comes of it."""
        engine = self._engine
        updates: list[Update] = []
        failure: BaseException | None = None
        try:
            with self._step_lock:
                if engine is not None:
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
        for output in self._live.take(updates):
            call = self._calls.get(output.request_id)
            if call is None:  # another of its samples has been looked at, and it has ended
                continue
            if output.finished:
                del self._calls[output.request_id]
            if output.finished or call.each_token:
                call.news[output.request_id] = output
                self._wake(call)
        self._pass_on()

    # --- within a change ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Holds the lock. At the end calls that were given up are closed, and a thread is woken where none leads."""
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

    def _abort(self, call: Call) -> None:
        self._asleep.pop(call, None)
        self._resign(call)
        for output in call.outputs:
            if self._calls.pop(output.request_id, None) is not None:
                self._live.abort(output.request_id)
            if call.each_token:
                call.show(output)
        self._pass_on()

    def _resign(self, call: Call) -> None:
        if self._leader is call:
            self._leader = None

    def _pass_on(self) -> None:
        """Tell the engine what has ended."""
        for ended in self._live.ended:
            if self._engine is not None:
                self._order(partial(self._engine.end, *ended))
        self._live.ended.clear()

    def _order(self, order: Callable[[], object]) -> None:
        if self._error is not None:
            return
        if self._stepping:
            self._orders.append(order)
        else:
            order()

    def _wake(self, *calls: Call) -> None:
        for call in calls:
            if call in self._asleep:
                del self._asleep[call]
                call.gate.release()
