"""The online face: submit requests to a running engine, iterate over their outputs, abort them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

from jengine.checkpoints import resolve
from jengine.config import EngineConfig
from jengine.engine import Engine, TokenUpdate
from jengine.errors import EngineDead, InvalidArgument
from jengine.outputs import LiveOutputs
from jengine.prompts import Prompt, make_request
from jengine.request import Request, RequestOutput, SamplingParams
from jengine.start import start
from jengine.text.tokenizer import Tokenizer

OutputKind = Literal["cumulative", "delta", "final"]


class AsyncLLM:
    """A model that answers many requests at once, inside one asyncio event loop.

    The engine's loop has a thread of its own and knows tokens only; text is made in the event loop. Requests from
    other event loops are refused.

    Args:
        model, progress, options: as for LLM.

    Example:
        >>> async with AsyncLLM("demo") as llm:
        ...     async for output in llm.generate("def fib(n):", output_kind="delta"):
        ...         print(output.outputs[0].text, end="")
    """

    def __init__(self, model: str | Path = "demo", *, progress: bool = True, **options: Any) -> None:
        config = EngineConfig.of(str(model), options)
        engine, self.started = start(config, progress=progress)
        tokenizer = Tokenizer.load(self.started.folder if config.tokenizer is None else resolve(config.tokenizer))
        self._attach(engine, tokenizer)

    @classmethod
    def over(cls, engine: Engine, tokenizer: Tokenizer) -> AsyncLLM:
        """Around an engine that runs already, or one that stands in for it."""
        llm = cls.__new__(cls)
        llm._attach(engine, tokenizer)
        return llm

    def _attach(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self._live = LiveOutputs(tokenizer)
        self._outputs: dict[str, tuple[RequestOutput, asyncio.Event]] = {}
        self._ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: BaseException | None = None
        self._closing = False
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # what the thread shall do; None ends it
        self._thread = threading.Thread(target=self._work, name="jengine", daemon=True)
        self._thread.start()

    # --- what users call, in the event loop ------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        output_kind: OutputKind = "cumulative",
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt. Leaving the iteration early aborts the request.

        Args:
            request_id: for `abort`; must not be in use. None makes one.
            priority: lower runs first, under policy="priority".
            timeout: seconds; then the request ends with finish_reason "abort" and stop_reason "timeout".
            output_kind: cumulative: all that there is so far, each time; delta: what is new; final: once, at the end. A slow
                reader gets several tokens at a time.

        Raises:
            InvalidArgument: it can never be answered. Nothing has been queued then.
            EngineDead: the engine has failed, or was closed.
        """
        if output_kind not in ("cumulative", "delta", "final"):
            raise InvalidArgument("output_kind", output_kind, "must be cumulative, delta or final")
        self._here()
        request = make_request(
            self.tokenizer, prompt, sampling_params, f"request-{next(self._ids)}" if request_id is None else request_id, priority
        )
        if request.request_id in self._outputs:
            raise InvalidArgument("request_id", request.request_id, "a request with this id is not finished yet")
        self.engine.check(request)
        output, grown = self._live.open(request), asyncio.Event()
        self._outputs[request.request_id] = output, grown
        self._inbox.put(lambda: self._add(request))
        cancel = None if timeout is None else asyncio.get_running_loop().call_later(timeout, self._end, request.request_id, "timeout")
        shown = 0  # tokens
        shown_text = 0  # characters
        try:
            while True:
                await grown.wait()
                grown.clear()
                if self._dead is not None and not output.finished:
                    raise EngineDead(f"the engine has stopped: {self._dead}") from self._dead
                ended = output.finished
                if ended or output_kind != "final":
                    delta = output_kind == "delta"
                    yield _snapshot(output, *((shown, shown_text) if delta else (0, 0)))
                    shown, shown_text = len(output.outputs[0].token_ids), len(output.outputs[0].text)
                if ended:
                    return
        finally:
            if cancel is not None:
                cancel.cancel()
            self._end(request.request_id, None)
            self._outputs.pop(request.request_id, None)

    async def abort(self, request_id: str) -> bool:
        """End a request; its iteration gets a last output with finish_reason "abort". False where there is none."""
        return self._end(request_id, None)

    async def close(self, drain: float = 0.0) -> None:
        """Stop: no new requests; `drain` seconds for those that run, then they are aborted; then the engine's thread ends."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain):
                while self._outputs:
                    await asyncio.sleep(0.01)
        for request_id in list(self._outputs):
            self._end(request_id, "shutdown")
        self._inbox.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _here(self) -> None:
        """Refuse what cannot be taken any more, and bind to the first event loop that asks."""
        if self._dead is not None:
            raise EngineDead(f"the engine has stopped: {self._dead}") from self._dead
        if self._closing:
            raise EngineDead("the engine has been closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise EngineDead("this AsyncLLM belongs to another event loop")

    def _end(self, request_id: str, why: str | None) -> bool:
        output = self._live.abort(request_id, why)
        if output is None:
            return False
        self._inbox.put(lambda: self._drop(request_id))
        self._outputs[request_id][1].set()
        return True

    def _deliver(self, updates: list[TokenUpdate]) -> None:
        for output in self._live.take(updates):
            if output.request_id in self._outputs:
                self._outputs[output.request_id][1].set()
        for request_id, stop in self._live.stopped:
            self._inbox.put(lambda request_id=request_id, stop=stop: self._stop(request_id, stop))  # type: ignore[misc]
        self._live.stopped.clear()

    def _fail(self, error: BaseException) -> None:
        self._dead = error
        for _, grown in self._outputs.values():
            grown.set()

    # --- what runs in the engine's thread --------------------------------------------------------

    def _work(self) -> None:
        try:
            while True:
                if not self._take_orders():
                    return
                updates = self.engine.step()
                if updates and self._loop is not None:
                    self._loop.call_soon_threadsafe(self._deliver, updates)
        except BaseException as error:  # whatever it is, nobody may wait for ever
            self._dead = error
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
                    self._loop.call_soon_threadsafe(self._fail, error)

    def _take_orders(self) -> bool:
        """Do what has been asked; with nothing to run, wait for it. False at the end."""
        while True:
            try:
                order = self._inbox.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _add(self, request: Request) -> None:
        self.engine.add(request)

    def _drop(self, request_id: str) -> None:
        self.engine.end(request_id, "abort")

    def _stop(self, request_id: str, stop: str) -> None:
        self.engine.end(request_id, "stop", stop)


def _snapshot(output: RequestOutput, tokens: int, characters: int) -> RequestOutput:
    """A copy that does not grow, from this many tokens and characters on."""
    completion = copy.copy(output.outputs[0])
    completion.text = completion.text[characters:]
    completion.token_ids = completion.token_ids[tokens:]
    completion.logprobs = None if completion.logprobs is None else completion.logprobs[tokens:]
    out = copy.copy(output)
    out.outputs, out.metrics = [completion], copy.copy(output.metrics)
    return out
