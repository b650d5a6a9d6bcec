"""The requests of an AsyncLLM in its event loop: queued, fed with tokens, ended."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from jengine.api.backend import Backend, Done, Updates
from jengine.api.outputs import LiveOutputs
from jengine.api.prompts import PreparedPrompt
from jengine.api.request_handle import OutputKind, RequestHandle
from jengine.base.errors import EngineDead, InvalidArgument, JengineError
from jengine.base.options import check_number
from jengine.base.process import check_process
from jengine.core.request import OUTPUT_KINDS
from jengine.engine.operations import Operation
from jengine.text.tokenizer import Tokenizer


class AsyncRequests:
    """Queues an AsyncLLM's requests and operations, and delivers outputs and answers in its event loop.

    Args:
        owner: the AsyncLLM, after whose end the engine ends too.
        interval: see EngineConfig.stream_interval.
        lazy: see LiveOutputs.
    """

    def __init__(
        self, owner: object, backend: Backend, tokenizer: Tokenizer, interval: int, *, lazy: bool
    ) -> None:
        self._backend, self._interval = backend, interval
        self._pid = os.getpid()
        self._live = LiveOutputs(tokenizer, lazy=lazy)
        self._handles: dict[str, RequestHandle] = {}  # by request id
        self._pending: set[asyncio.Future[Any]] = set()  # answers of operations
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: BaseException | None = None
        self._closing = False
        backend.connect(lambda updates: self._post(self._deliver, updates), self._died)
        atexit.register(backend.quit)  # a daemon thread inside XLA would crash the process at exit
        self._finalizer = weakref.finalize(owner, _quit_later, backend, self._pid)
        self._finalizer.atexit = False

    def check(self, request_id: object, timeout: float | None, output_kind: object) -> None:
        """Checks the options of a new request, in the event loop.

        Raises:
            InvalidArgument: an option is invalid, or the id is in use.
            EngineDead: the engine has failed, or was closed.
        """
        self._check_usable()
        if output_kind not in OUTPUT_KINDS:
            raise InvalidArgument("output_kind", output_kind, f"must be one of {', '.join(OUTPUT_KINDS)}")
        if timeout is not None:
            check_number("timeout", timeout, 0.0, math.inf, "a finite number of seconds, at least 0")
        if request_id is not None and not isinstance(request_id, str):
            raise InvalidArgument("request_id", request_id, "must be text")
        self._bind()
        self._check_id(request_id)

    def open(
        self, prepared: PreparedPrompt, request_id: str | None, timeout: float | None, kind: OutputKind
    ) -> RequestHandle:
        """Queues a prompt's requests, which `check` accepted. Raises InvalidArgument if an id is in use."""
        requests, key = prepared.requests, prepared.requests[0].request_id
        if request_id is None:
            self._check_id(request_id := key)
        self._backend.add(*requests)  # updates are delivered in a later iteration of the event loop
        output = self._live.open(requests, prepared.stops)
        output.request_id = request_id
        end, settle = partial(self._end, key), partial(self._settle, key)
        handle = RequestHandle(output, kind, end, self._forget, settle, self._interval)
        self._handles[request_id] = handle
        if timeout is not None:
            handle.timer = asyncio.get_running_loop().call_later(timeout, handle.abort, "timeout")
        return handle

    def abort(self, request_id: str | Iterable[str]) -> bool:
        """AsyncLLM.abort."""
        names = [request_id] if isinstance(request_id, str) else request_id
        return any([self._handles[name].abort() for name in names if name in self._handles])

    async def do[T](self, operation: Operation[T]) -> T:
        """AsyncLLM.do."""
        self._check_usable()
        self._bind()
        pending: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.order(operation, partial(self._post, _resolve, pending))
        self._pending.add(pending)  # it is settled in a later iteration of the event loop
        pending.add_done_callback(self._pending.discard)
        return await pending

    def order(self, operation: Operation[Any], done: Done) -> None:
        """Starts an operation, in any thread. Raises as `do`."""
        self._check_usable()
        operation.check(self._backend.limits)
        self._backend.do(operation, done)

    async def close(self, drain: float) -> None:
        """AsyncLLM.close."""
        self._closing = True
        self._bind()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain
        while (
            self._dead is None
            and loop.time() < deadline
            and any(not handle.finished for handle in self._handles.values())
        ):
            await asyncio.sleep(0.01)
        if self._dead is None:
            for handle in self._handles.values():
                handle.abort("shutdown")
        await loop.run_in_executor(None, self._backend.quit)
        self._fail_pending(EngineDead("the engine has been closed"))
        atexit.unregister(self._backend.quit)
        self._finalizer.detach()

    def quit(self) -> None:
        """AsyncLLM.shutdown."""
        self._closing = True
        self._backend.quit()
        self._died(EngineDead("it was shut down"))
        atexit.unregister(self._backend.quit)
        self._finalizer.detach()

    def _check_usable(self) -> None:
        check_process(self._pid)
        if self._dead is not None:
            raise EngineDead(f"the engine has stopped: {self._dead!r}") from self._dead
        if self._closing:
            raise EngineDead("the engine has been closed")

    def _check_id(self, request_id: str | None) -> None:
        if request_id in self._handles:
            raise InvalidArgument("request_id", request_id, "a request with this id is not finished yet")

    def _bind(self) -> None:
        """Bind to the running event loop, unless requests may be waiting in another one."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise JengineError("this AsyncLLM is used in another event loop, which has not been closed")
            for handle in self._handles.values():
                handle.abort()
            self._handles.clear()
            self._pending.clear()
        self._loop = loop

    def _end(self, key: str, why: str | None) -> bool:
        """Ends the request with this engine-side key. Keys are never reused, so late tokens cannot reach
        another request."""
        with self._making_text():
            if self._live.abort(key, why) is not None:
                self._pass_on()
                return True
        return False

    def _forget(self, handle: RequestHandle) -> None:
        if self._handles.get(handle.request_id) is handle:
            del self._handles[handle.request_id]

    def _pass_on(self) -> None:
        """Reports ended requests to the engine."""
        for ended in self._live.ended:
            self._backend.end(*ended)
        self._live.ended.clear()

    def _deliver(self, updates: Updates) -> None:
        with self._making_text():
            for output in self._live.take(updates):
                self._handles[output.request_id].grow()
            self._pass_on()

    def _settle(self, key: str) -> None:
        with self._making_text():
            self._live.settle(key)

    @contextlib.contextmanager
    def _making_text(self) -> Iterator[None]:
        """A fault ends everything: the event loop would only log it, and all requests would hang."""
        try:
            yield
        except Exception as error:
            self._backend.quit(wait=False)
            self._fail(error)

    def _died(self, error: BaseException) -> None:
        self._dead = error  # set first, so that further requests are rejected immediately
        self._post(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self._dead = error
        for handle in self._handles.values():
            handle.fail(error)
        self._fail_pending(EngineDead(f"the engine has stopped: {error!r}"))

    def _fail_pending(self, error: EngineDead) -> None:
        for pending in self._pending:
            _resolve(pending, None, error)

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        """Calls a function in the event loop, from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: no caller is waiting
                self._loop.call_soon_threadsafe(call, *arguments)


def _quit_later(backend: Backend, pid: int) -> None:
    """Ends an engine whose AsyncLLM has been collected, which may happen in any thread, also the engine's."""
    if os.getpid() == pid:  # a forked process has a copy, and not the engine
        threading.Thread(target=backend.quit, name="quit").start()  # the process waits for it before it exits
        atexit.unregister(backend.quit)


def _resolve[T](pending: asyncio.Future[T], answer: T, error: Exception | None) -> None:
    if pending.done():  # the caller may have been cancelled
        return
    if error is None:
        pending.set_result(answer)
    else:
        pending.set_exception(error)
