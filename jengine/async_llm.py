"""The online face: submit requests to a running engine, iterate over their outputs, abort them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import math
import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack

from jengine.backend import Backend, EngineThread, Updates
from jengine.chat import ChatOptions, Conversation, chat_prompt
from jengine.config import EngineConfig
from jengine.errors import EngineDead, InvalidArgument, JengineError
from jengine.outputs import LiveOutputs
from jengine.process import check_process
from jengine.prompts import Prompt, make_requests
from jengine.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from jengine.text.tokenizer import Tokenizer
from jengine.updates import Load

OutputKind = Literal["cumulative", "delta", "final"]
OUTPUT_KINDS = ("cumulative", "delta", "final")


@dataclass(slots=True)
class _Caller:
    """Somebody who iterates over a request's outputs."""

    key: str  # the request's name in the engine, never used again: tokens that come late for one request cannot reach another
    output: RequestOutput  # grows
    kind: OutputKind
    grown: asyncio.Event = field(default_factory=asyncio.Event)


class AsyncLLM:
    """A model that answers many requests at once, inside an asyncio event loop.

    The engine's loop has a thread of its own and knows tokens only; text is made in the event loop. One event loop at a
    time: after it has been closed (asyncio.run has returned), another may go on.

    Args:
        model, progress, options: as for LLM.

    Example:
        >>> async with AsyncLLM("demo") as llm:
        ...     async for output in llm.generate("def fib(n):", output_kind="delta"):
        ...         print(output.outputs[0].text, end="")
    """

    def __init__(self, model: str | Path = "demo", *, progress: bool = True, **options: Any) -> None:
        from jengine.start import start_engine  # an AsyncLLM over an engine elsewhere needs no jax

        engine, self.started = start_engine(EngineConfig.of(str(model), options), progress=progress)
        self._attach(EngineThread(engine), self.started.require_tokenizer(), self.started.default_sampling_params)

    @classmethod
    def over(cls, backend: Backend, tokenizer: Tokenizer, default_sampling_params: SamplingParams | None = None) -> AsyncLLM:
        """Around an engine that runs elsewhere. Requests without sampling parameters get the default ones; None is SamplingParams()."""
        llm = cls.__new__(cls)
        llm._attach(backend, tokenizer, SamplingParams() if default_sampling_params is None else default_sampling_params)
        return llm

    def _attach(self, backend: Backend, tokenizer: Tokenizer, default_sampling_params: SamplingParams) -> None:
        self.backend, self.tokenizer, self._default_params = backend, tokenizer, default_sampling_params
        self._pid = os.getpid()
        self._live = LiveOutputs(tokenizer)
        self._callers: dict[str, _Caller] = {}  # by request id
        self._ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: BaseException | None = None
        self._closing = False
        backend.connect(lambda updates: self._post(self._deliver, updates), self._died)
        atexit.register(backend.quit)  # a daemon thread inside XLA while the interpreter goes would crash the process

    @property
    def load(self) -> Load:
        """How busy the engine is, as last heard of it."""
        return self.backend.load

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of requests that bring none: what the model's generation_config.json recommends, unless generation_config is "vllm"."""
        return self._default_params

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

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
    ) -> AsyncGenerator[RequestOutput]:
        """Complete one prompt. Leaving the iteration early aborts the request.

        Args:
            sampling_params: None takes `get_default_sampling_params()`.
            request_id: for `abort`; must not be in use. None makes one.
            priority: lower runs first, under policy="priority".
            timeout: seconds; then the request ends with finish_reason "abort" and stop_reason "timeout".
            output_kind: cumulative: all that there is so far, each time; delta: the text, tokens and logprobs that are new, of every
                completion, those without news too; final: once, at the end. A slow reader gets several tokens at a time.

        Raises:
            InvalidArgument: when the iteration begins: it can never be answered. Nothing has been queued then.
            EngineDead: the engine has failed, or was closed.
        """
        caller = self._submit(prompt, sampling_params, request_id, priority, timeout, output_kind)
        output = caller.output
        cancel = None if timeout is None else asyncio.get_running_loop().call_later(timeout, self._end, caller, "timeout")
        shown: dict[int, tuple[int, int]] = {}  # of a delta's completions, by index: tokens, characters
        try:
            ended = False
            while not ended:
                await caller.grown.wait()
                caller.grown.clear()
                ended = output.finished
                if self._dead is not None and not ended:
                    raise EngineDead(f"the engine has stopped: {self._dead!r}") from self._dead
                if ended or output_kind != "final":
                    news = _snapshot(output, shown)
                    if output_kind == "delta":
                        shown = {c.index: (len(c.token_ids), len(c.text)) for c in output.outputs}
                    yield news
        finally:
            if cancel is not None:
                cancel.cancel()
            self._end(caller, None)
            if self._callers.get(output.request_id) is caller:
                del self._callers[output.request_id]

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        output_kind: OutputKind = "cumulative",
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput]:
        """Answer one conversation, by the model's chat template; as `generate`.

        Args:
            messages: dicts with "role" and "content".
            options: how the conversation becomes a prompt; see ChatOptions.

        Raises:
            InvalidArgument: at the call, a message or option is wrong; when the iteration begins, as `generate`.
            ModelError: the model has no chat template.
        """
        prompt = chat_prompt(self.tokenizer, messages, **options)
        return self.generate(prompt, sampling_params, request_id=request_id, priority=priority, timeout=timeout, output_kind=output_kind)

    def find(self, request_id: str) -> RequestOutput | None:
        """The output of a request that somebody iterates over, as far as it has come: it grows. None where it is unknown or over."""
        caller = self._callers.get(request_id)
        return None if caller is None else caller.output

    async def abort(self, request_id: str) -> bool:
        """End a request; its iteration gets a last output with finish_reason "abort". False where it is unknown or has ended."""
        caller = self._callers.get(request_id)
        return caller is not None and self._end(caller, None)

    async def close(self, drain: float = 0.0) -> None:
        """Stop: no new requests; up to `drain` seconds for those that run, then they are aborted with stop_reason "shutdown";
        then the engine's thread ends. May be called again."""
        self._closing = True
        self._bind()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain
        while self._dead is None and loop.time() < deadline and any(not caller.output.finished for caller in self._callers.values()):
            await asyncio.sleep(0.01)
        if self._dead is None:
            for caller in self._callers.values():
                self._end(caller, "shutdown")
        await loop.run_in_executor(None, self.backend.quit)
        atexit.unregister(self.backend.quit)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- their work ------------------------------------------------------------------------------

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        timeout: float | None,
        kind: OutputKind,
    ) -> _Caller:
        """Check everything, then queue."""
        check_process(self._pid)
        if self._dead is not None:
            raise EngineDead(f"the engine has stopped: {self._dead!r}") from self._dead
        if self._closing:
            raise EngineDead("the engine has been closed")
        if kind not in OUTPUT_KINDS:
            raise InvalidArgument("output_kind", kind, f"must be one of {', '.join(OUTPUT_KINDS)}")
        if timeout is not None and not (type(timeout) in (int, float) and math.isfinite(timeout) and timeout >= 0):
            raise InvalidArgument("timeout", timeout, "must be a finite number of seconds, at least 0")
        key = f"request-{next(self._ids)}"
        if request_id is None:
            request_id = key
        elif not isinstance(request_id, str):
            raise InvalidArgument("request_id", request_id, "must be text")
        self._bind()
        if request_id in self._callers:
            raise InvalidArgument("request_id", request_id, "a request with this id is not finished yet")
        params = self._default_params if params is None else params
        requests = make_requests(self.tokenizer, prompt, params, key, priority, masks=not self.backend.makes_masks)
        for request in requests:
            self.backend.limits.validate(request)
        output = self._live.open(requests)
        output.request_id = request_id
        caller = self._callers[request_id] = _Caller(key, output, kind)
        self.backend.add(*requests)
        return caller

    def _bind(self) -> None:
        """To the event loop that runs now, unless requests may be waiting in another one."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise JengineError("this AsyncLLM is used in another event loop, which has not been closed")
            for caller in self._callers.values():
                self._end(caller, None)
            self._callers.clear()
        self._loop = loop

    def _end(self, caller: _Caller, why: str | None) -> bool:
        if self._live.abort(caller.key, why) is None:
            return False
        self._pass_on()
        caller.grown.set()
        return True

    def _pass_on(self) -> None:
        """Tell the engine what has ended."""
        for ended in self._live.ended:
            self.backend.end(*ended)
        self._live.ended.clear()

    def _deliver(self, updates: Updates) -> None:
        try:
            for output in self._live.take(updates):
                caller = self._callers[output.request_id]
                if output.finished or caller.kind != "final":
                    caller.grown.set()
            self._pass_on()
        except Exception as error:  # a fault in making text: the event loop would log it, and everybody would wait
            self.backend.quit(wait=False)
            self._fail(error)

    def _died(self, error: BaseException) -> None:
        self._dead = error  # at once: the next request is refused, whatever the event loop does meanwhile
        self._post(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self._dead = error
        for caller in self._callers.values():
            caller.grown.set()

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        """Call it in the event loop, from whatever thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has been closed: nobody waits
                self._loop.call_soon_threadsafe(call, *arguments)


def _snapshot(output: RequestOutput, shown: dict[int, tuple[int, int]]) -> RequestOutput:
    """A copy that does not grow; of each completion only what comes after these tokens and characters."""
    parts, times = [], output.metrics
    for completion in output.outputs:  # made anew: copy.copy takes four times as long, once for every token that is streamed
        tokens, characters = shown.get(completion.index, (0, 0))
        part = CompletionOutput(
            index=completion.index,
            text=completion.text[characters:],
            token_ids=completion.token_ids[tokens:],
            logprobs=None if completion.logprobs is None else completion.logprobs[tokens:],
            cumulative_logprob=completion.cumulative_logprob,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        parts.append(part)
    return RequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        outputs=parts,
        prompt_logprobs=None if shown else output.prompt_logprobs,  # they were all there before the first token
        finished=output.finished,
        metrics=RequestMetrics(
            arrival=times.arrival,
            scheduled=times.scheduled,
            first_token=times.first_token,
            finished=times.finished,
            preemptions=times.preemptions,
        ),
    )
