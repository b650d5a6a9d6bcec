"""The engine process: only a step loop. Its server is at the other end of an inherited socket.

The main thread steps the engine and sends updates. A second thread reads orders, so that parsing them does
not delay steps, and the server's death is noticed even during a long compilation; the process then exits
immediately. A third thread creates token masks, which may take a second, so that other requests can proceed.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import queue
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from jengine import InvalidArgument, JengineError, SamplingParams, Tokenizer
from jengine.serving.processes.turns import Turns
from jengine.serving.processes.watchdog import Heartbeat
from jengine.serving.processes.wire import (
    RECEIVE,
    TOTALS_SECONDS,
    Add,
    Answered,
    Configure,
    Do,
    End,
    Frames,
    Gallery,
    Order,
    Picture,
    Quit,
    Ready,
    Starting,
    StepUpdates,
    WireMessage,
    failed,
    frame,
    has_masks,
    requests_of,
)
from jengine.spi import (
    BeamsFound,
    Ended,
    Pooled,
    PromptScores,
    Request,
    StepTotals,
    TokenMask,
    TokenUpdate,
    Updates,
    decode_operation,
    run_engine,
    run_operation,
)

if TYPE_CHECKING:
    from jengine.spi import AnyEngine  # imports jax, which an engine may not need

Made = list[Request] | tuple[list[str], Exception]
LISTS: dict[type[object], str] = {  # of StepUpdates
    TokenUpdate: "tokens", PromptScores: "scores", Pooled: "pooled", BeamsFound: "beams", Ended: "ended",
}  # fmt: skip
REPORT_SECONDS = 0.2  # between two reports of the same work during the start


class MaskQueue:
    """Orders that wait for their masks. Clients take turns, by the time that their masks have taken.

    Args:
        tokenizer: returns the model's.
        made: called in the thread with the requests of an order, or with their ids and the error; only those
            that are still wanted.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer | None], made: Callable[[Made], None]) -> None:
        self._tokenizer, self._made = tokenizer, made
        self._masks = SharedMasks()
        self._turns: Turns[_WaitingOrder] = Turns()
        self._waiting: dict[str, _WaitingOrder] = {}  # by request id, until the masks have been made
        self._changed = threading.Condition()  # protects these

    def start(self) -> None:
        threading.Thread(target=self._run, name="masks", daemon=True).start()

    def put(self, order: Add) -> None:
        with self._changed:
            waiting = _WaitingOrder(order)
            self._waiting.update(dict.fromkeys(waiting.wanted, waiting))
            self._turns.put(order.client, waiting)
            self._changed.notify()

    def end(self, request_id: str) -> bool:
        """Forgets a request. Returns False if it does not wait here. When all of a prompt's are forgotten,
        nothing is compiled.
        """
        with self._changed:
            waiting = self._waiting.pop(request_id, None)
            if waiting is None:
                return False
            waiting.wanted.discard(request_id)
            if not waiting.wanted:
                self._turns.remove(waiting.order.client, waiting)
            return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while (following := self._turns.take()) is None:
                    self._changed.wait()
            self.make(following[1])

    def make(self, waiting: _WaitingOrder) -> None:
        """Makes the masks of an order. Runs in the thread."""
        order, began = waiting.order, time.monotonic()
        requests, error = [], None
        try:
            requests = requests_of(order, self._tokenizer(), self._masks.of(order.client))
        except Exception as wrong:  # of one prompt; llguidance raises its own errors
            error = wrong
        with self._changed:
            self._turns.spend(order.client, time.monotonic() - began)
            for request_id in waiting.wanted:
                del self._waiting[request_id]
            if error is not None:
                self._made((list(waiting.wanted), error))
            else:  # with the lock, so that a request that is ended from now on is known to the engine
                self._made([request for request in requests if request.request_id in waiting.wanted])


class _WaitingOrder:
    """An order, and the ids of its requests that have not been ended."""

    def __init__(self, order: Add) -> None:
        self.order, self.wanted = order, {sample.request_id for sample in order.samples}


class SharedMasks:
    """Makes masks. Equal constraints of a client are compiled once, as long as one of its requests uses them.

    So the prompts of a request share what is compiled. Clients share nothing, since all copies of a grammar
    have one limit on their states, and fail together if one of them is too slow.
    """

    def __init__(self) -> None:
        self._origins: weakref.WeakValueDictionary[tuple[str, Any], _Origin] = weakref.WeakValueDictionary()

    def of(self, client: str) -> Callable[[SamplingParams, Tokenizer, int], Sequence[TokenMask | None]]:
        """jengine.make_masks for this client's requests."""

        def masks_of(params: SamplingParams, tokenizer: Tokenizer, count: int) -> Sequence[TokenMask | None]:
            key = client, repr((params.structured_outputs, params.bad_words, params.allowed_token_ids))
            origin = self._origins.get(key)
            if origin is None or origin.failed:
                origin = self._origins[key] = _Origin(params, tokenizer)
            return [_Copy(origin) for _ in range(count)]

        return masks_of


class _Origin:
    """A mask that is only copied.

    Attributes:
        failed: whether a copy has failed.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        from jengine.spi import make_masks  # imported here, since only structured outputs need llguidance

        [self.mask] = make_masks(params, tokenizer, 1)
        self.failed = False


class _Copy:
    """A TokenMask that keeps its origin alive, and tells it of failures."""

    def __init__(self, origin: _Origin) -> None:
        mask: Any = origin.mask
        self._origin, self._mask = origin, mask.copy()
        self.accept, self.rollback, self.forced = self._mask.accept, self._mask.rollback, self._mask.forced
        self.free, self.is_complete = self._mask.free, self._mask.is_complete

    def fill(self, words: np.ndarray) -> None:
        try:
            self._mask.fill(words)
        except JengineError:
            self._origin.failed = True
            raise


class EngineChild:
    """An engine that receives its orders from a socket."""

    def __init__(self, server: socket.socket, heartbeat: Heartbeat) -> None:
        self._server, self._heartbeat = server, heartbeat
        self._frames: Frames[Order] = Frames(Order)
        self._gallery = Gallery()
        # functions to call in the loop; None ends it
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._configured: queue.SimpleQueue[Configure] = queue.SimpleQueue()
        self._tokenizer: Tokenizer | None = None
        self._masks = MaskQueue(lambda: self._tokenizer, self._masked)
        self._engine: AnyEngine
        self._told: object = None  # the last load sent to the server
        self._fresh = False  # whether nothing has happened since it was sent
        self._totals, self._totals_at = StepTotals(), 0.0  # the last totals sent to the server, and the time
        self._working_on, self._reported_at = "", 0.0  # the start's last reported work, and the time

    def run(self) -> None:
        """Starts the engine, and steps it until the server sends Quit."""
        threading.Thread(target=self._read, name="orders", daemon=True).start()
        self._masks.start()
        configure = self._configured.get()
        module, _, function = configure.engine.partition(":")
        make = getattr(import_module(module), function)
        watching = {"report": self._report_start} if "report" in inspect.signature(make).parameters else {}
        self._engine, self._tokenizer, info = make(**json.loads(configure.options), **watching)
        gc.collect()
        gc.freeze()  # excludes objects of the start from garbage collection
        self._told = self._engine.load
        self._heartbeat.ready(info.longest_step)
        self._send(Ready(self._engine.limits, self._engine.load, info))
        run_engine(self._engine, self._take_orders, self._deliver)

    def _report_start(self, work: str, unit: str, done: int, total: int) -> None:
        """Sends the start's progress, a few times a second. Called in the loop's thread."""
        now = time.monotonic()
        if work != self._working_on or done == total or now >= self._reported_at + REPORT_SECONDS:
            self._working_on, self._reported_at = work, now
            self._send(Starting(work, unit, done, total))

    # --- the loop's thread -----------------------------------------------------------------------

    def _take_orders(self, wait: bool) -> bool:
        while True:
            self._heartbeat.turn()
            if self._inbox.empty():
                untold = wait and self._engine.totals().steps != self._totals.steps
                # a request was removed, or is waiting: no tokens report this
                if untold or (not self._fresh and self._engine.load != self._told):
                    self._deliver((), totals=untold)
                self._fresh = False
                if not wait:
                    return True
            with self._heartbeat.idle():
                order = self._next_order()
            if order is None:
                return False
            order()
            self._fresh = False
            wait = not (self._engine.has_work or self._engine.has_unused_programs)

    def _next_order(self) -> Callable[[], object] | None:
        """Waits for an order, at most a second while programs become ready, to report these to the server."""
        load = self._engine.load
        try:
            return self._inbox.get(timeout=None if load.programs_ready == load.programs else 1.0)
        except queue.Empty:
            return lambda: None

    def _deliver(self, updates: Updates, totals: bool = False) -> None:
        now = time.monotonic()
        if totals := totals or now >= self._totals_at + TOTALS_SECONDS:
            self._totals, self._totals_at = self._engine.totals(), now
        self._told = load = self._engine.load
        self._fresh = True
        lists: dict[str, list[Any]] = {name: [] for name in LISTS.values()}
        for update in updates:
            lists[LISTS[type(update)]].append(update)
        self._send(StepUpdates(**lists, load=load, totals=self._totals if totals else None))

    def _add(self, requests: list[Request]) -> None:
        try:
            self._engine.add(*requests)
        except InvalidArgument as error:
            self._refuse([request.request_id for request in requests], error)
        except Exception as error:
            # a dead engine would end all other requests, and might receive this one again
            traceback.print_exc()
            for request in requests:
                self._engine.end(request.request_id, "error")
            self._refuse([request.request_id for request in requests], error)

    def _refuse(self, request_ids: list[str], error: Exception) -> None:
        self._deliver([Ended.of_refused(request_id, error) for request_id in request_ids])

    def _answer(self, number: int, answer: Any, error: Exception | None) -> None:
        try:
            if error is not None:
                raise error
            answered = frame(Answered(number, msgspec.json.encode(answer)))
        except Exception as wrong:
            # in the operation; or its answer is too large, or JSON cannot represent it
            if not isinstance(wrong, JengineError):
                traceback.print_exception(wrong)
            answered = frame(Answered(number, error=failed(wrong)))
        self._server.sendall(answered)

    def _send(self, message: WireMessage) -> None:
        self._server.sendall(frame(message))

    # --- the orders' thread ----------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while data := self._server.recv(RECEIVE):
                for order in self._frames.take(data):
                    self._pass_on(order)
        except ConnectionError:
            pass
        except Exception:  # a fault here or in the server: no one would continue to read
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # the server has gone

    def _pass_on(self, order: Order) -> None:
        if isinstance(order, Add) and order.pictures is not None:
            self._gallery.give(order.pictures)
        match order:
            case Configure():
                self._configured.put(order)
            case Picture():
                self._gallery.keep(order)
            case Add() if has_masks(order):
                self._masks.put(order)
            case Add():
                self._inbox.put(self._adding(order))
            case End(ended):
                if not self._masks.end(ended.request_id):
                    self._inbox.put(lambda: self._engine.end(*ended))
            case Do(number, name, arguments):
                operation = decode_operation(name, arguments)
                put = self._put_unwatched if operation.unbounded else self._inbox.put
                run_operation(self._engine, operation, put, partial(self._answer, number))
            case Quit():
                self._inbox.put(None)

    def _put_unwatched(self, order: Callable[[], object]) -> None:
        """Queues an order that may take any time."""
        self._inbox.put(self._heartbeat.idle()(order))

    def _masked(self, made: Made) -> None:
        """Called by the masks' thread."""
        if isinstance(made, tuple):
            self._inbox.put(lambda: self._refuse(*made))
        elif made:
            self._inbox.put(lambda: self._add(made))

    def _adding(self, order: Add) -> Callable[[], object]:
        try:
            requests = requests_of(order, self._tokenizer)
        except Exception as error:  # of one prompt; llguidance raises its own errors
            request_ids, why = [sample.request_id for sample in order.samples], error
            return lambda: self._refuse(request_ids, why)
        return lambda: self._add(requests)


def run(server: socket.socket, heartbeat: Heartbeat) -> int:
    """Runs an engine process, after engine_main. Returns the exit code.

    The socket is never closed: the server notices the end of this process by the end of the stream.
    """
    try:
        EngineChild(server, heartbeat).run()
        return 0
    except ConnectionError:  # the server has gone
        return 0
    except Exception as error:
        if not isinstance(error, JengineError):
            traceback.print_exc()
        with contextlib.suppress(ConnectionError):
            server.sendall(frame(failed(error)))
        return 1
