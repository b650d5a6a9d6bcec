"""The online interface: submit requests to a running engine, iterate over their outputs, abort them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import math
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from jengine.api.backend import Backend, Done, EngineThread, Updates
from jengine.api.chat import ChatOptions, Conversation, chat_prompt, split_options
from jengine.api.embedding_methods import AsyncEmbeddings
from jengine.api.engine_methods import AsyncEngineMethods
from jengine.api.loras import AsyncLoras
from jengine.api.outputs import LiveOutputs
from jengine.api.prompts import PreparedPrompt, Prompt, is_slow, make_requests
from jengine.api.request_handle import OUTPUT_KINDS, OutputKind, RequestHandle, RequestOptions
from jengine.api.rollout_methods import AsyncRolloutMethods
from jengine.api.vllm_methods import VllmMethods
from jengine.base.checks import check_number
from jengine.base.errors import EngineDead, InvalidArgument, JengineError
from jengine.base.process import check_process
from jengine.core.beam_outputs import GenerationParams, split
from jengine.core.config import EngineConfig
from jengine.core.engine_options import EngineOptions
from jengine.core.lora import LoRARequest
from jengine.core.request import RequestOutput, SamplingParams
from jengine.core.service_level import LevelOptions, ServiceLevel
from jengine.core.updates import Load
from jengine.engine.operations import Operation
from jengine.text.stop_strings import StopAutomaton
from jengine.text.tokenizer import Tokenizer
from jengine.vllm.translate import accepts

if TYPE_CHECKING:
    from jax.sharding import Mesh


class AsyncChatOptions(ChatOptions, RequestOptions, total=False):
    """AsyncLLM.chat's keywords."""


class AsyncLLM(AsyncEngineMethods, AsyncRolloutMethods, AsyncEmbeddings, VllmMethods):
    """A model that answers many requests at once, inside an asyncio event loop.

    The engine's loop runs in its own thread and handles tokens only; the event loop turns them into text. Use
    one event loop at a time: after it has been closed (asyncio.run has returned), you may continue in
    another.

    Args:
        model, mesh, params, progress, options: as for LLM.

    Examples:
        >>> async with AsyncLLM("demo") as llm:
        ...     async for output in llm.generate("def fib(n):", output_kind="delta"):
        ...         print(output.outputs[0].text, end="")
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        mesh: Mesh | None = None,
        params: Any = None,
        progress: bool = True,
        **options: Unpack[EngineOptions],
    ) -> None:
        from jengine.engine.start import (
            start_engine,  # imported here, since an AsyncLLM over a remote engine needs no jax
        )
        from jengine.parallel.mesh import with_mesh_size

        config = EngineConfig.of(str(model), with_mesh_size(dict(options), mesh))
        engine, self.started = start_engine(config, mesh=mesh, params=params, progress=progress)
        self._attach(
            EngineThread(engine),
            self.started.require_tokenizer(),
            self.started.default_sampling_params,
            config.stream_interval,
        )
        self.model = config.model

    @classmethod
    def over(
        cls,
        backend: Backend,
        tokenizer: Tokenizer,
        default_sampling_params: SamplingParams | None = None,
        *,
        stream_interval: int = 1,
    ) -> AsyncLLM:
        """Wrap an engine that runs elsewhere. Requests without sampling parameters get
        `default_sampling_params`, or else SamplingParams().

        Outputs' prompt_logprobs are sequences that describe a position when it is read, not lists.
        """
        llm = cls.__new__(cls)
        llm._attach(
            backend, tokenizer, default_sampling_params or SamplingParams(), stream_interval, lazy=True
        )
        return llm

    def _attach(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        default_sampling_params: SamplingParams,
        interval: int,
        lazy: bool = False,
    ) -> None:
        self.backend, self.tokenizer, self._interval = backend, tokenizer, interval
        self._default_params = default_sampling_params
        self._pid = os.getpid()
        self.loras = AsyncLoras(self.do, lambda: self.backend.limits)
        self._live = LiveOutputs(tokenizer, lazy=lazy)
        self._handles: dict[str, RequestHandle] = {}  # by request id
        self._pending: set[asyncio.Future[Any]] = set()  # answers of operations
        self._ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: BaseException | None = None
        self._closing = False
        backend.connect(lambda updates: self._post(self._deliver, updates), self._died)
        atexit.register(backend.quit)  # a daemon thread inside XLA would crash the process at exit

    @property
    def load(self) -> Load:
        """How busy the engine is, as it last reported."""
        return self.backend.load

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that pass none: the model's generation_config.json, unless
        generation_config is "vllm".
        """
        return self._default_params

    # --- public, called in the event loop --------------------------------------------------------

    @accepts
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: GenerationParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput]:
        """Complete one prompt. Leaving the iteration early aborts the request.

        Args:
            sampling_params: None is `get_default_sampling_params()`. BeamSearchParams give one output, at the
                end, with a completion for each beam.
            request_id: for `abort`; must not be in use. None generates one.
            lora_request: the adapter: a LoRARequest, which is loaded at its first use, or the name of a
                loaded one; None is the model alone.
            options: priority, targets, timeout and kind of outputs; see RequestOptions. A slow reader gets
                several tokens at a time.

        Raises:
            InvalidArgument: when the iteration begins; the prompt or a parameter is invalid, or too large.
                Nothing has been queued.
            ModelError: the adapter cannot be loaded.
            EngineDead: the engine has failed, or was closed.
        """
        await self.loras.require(lora_request)
        work: Prompt | PreparedPrompt = prompt
        grammar = (
            not self.backend.makes_masks and getattr(sampling_params, "structured_outputs", None) is not None
        )
        if grammar or is_slow(prompt):  # compiling a grammar may take a second
            work = await asyncio.to_thread(self.prepare, prompt, sampling_params)
        handle = self.submit(
            work, sampling_params, request_id=request_id, lora_request=lora_request, **options
        )
        async with handle:
            async for output in handle:
                yield output

    @accepts
    def chat(
        self,
        messages: Conversation,
        sampling_params: GenerationParams | None = None,
        *,
        request_id: str | None = None,
        lora_request: LoRARequest | str | None = None,
        **options: Unpack[AsyncChatOptions],
    ) -> AsyncGenerator[RequestOutput]:
        """Answer one conversation, with the model's chat template; otherwise like `generate`.

        Args:
            messages: dicts with "role" and "content".
            lora_request: as for `generate`. The template stays the model's.
            options: how the conversation becomes a prompt, see ChatOptions; and as for `generate`, see
                RequestOptions.

        Raises:
            InvalidArgument: at the call, a message or option is wrong; when the iteration begins, as
                `generate`.
            ModelError: the model has no chat template.
        """
        request, chat = split_options(options, RequestOptions)
        prompt = chat_prompt(self.tokenizer, messages, max_model_len=self.max_model_len, **chat)
        return self.generate(prompt, sampling_params, request_id, lora_request=lora_request, **request)

    async def abort(self, request_id: str) -> bool:
        """End a request; its iteration gets a last output with finish_reason "abort". False: the id is
        unknown, or it has ended.
        """
        handle = self._handles.get(request_id)
        return handle is not None and handle.abort()

    async def do[T](self, operation: Operation[T]) -> T:
        """Have the engine do an operation, and return its answer. The methods below are shorter forms of it.

        Raises:
            InvalidArgument: this engine cannot do it.
            EngineDead: the engine has failed, or was closed.
        """
        self._check_usable()
        self._bind()
        pending: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._order(operation, partial(self._post, _resolve, pending))
        self._pending.add(pending)  # it is settled in a later iteration of the event loop
        pending.add_done_callback(self._pending.discard)
        return await pending

    async def close(self, drain: float = 0.0) -> None:
        """Stop accepting requests, give running ones up to `drain` seconds to finish, abort the rest with
        stop_reason "shutdown", and end the engine's thread. May be called again.
        """
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
        await loop.run_in_executor(None, self.backend.quit)
        self._fail_asked(EngineDead("the engine has been closed"))
        atexit.unregister(self.backend.quit)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine's thread, also from outside the event loop. Running requests fail with EngineDead;
        `close` aborts them.

        Args:
            timeout: accepted as in vLLM, and not used: the thread ends after its current step.
        """
        self._closing = True
        self.backend.quit()
        self._died(EngineDead("it was shut down"))
        atexit.unregister(self.backend.quit)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- public, the steps of a request ----------------------------------------------------------------

    def prepare(self, prompt: Prompt, sampling_params: GenerationParams | None = None) -> PreparedPrompt:
        """Validate and tokenize a prompt, for `submit`. May be called in any thread, so that long text does
        not block the event loop.

        Raises:
            InvalidArgument: it can never be answered.
        """
        params, beams = split(self._default_params if sampling_params is None else sampling_params)
        requests = make_requests(
            self.tokenizer,
            prompt,
            params,
            f"request-{next(self._ids)}",
            max_model_len=self.max_model_len,
            masks=not self.backend.makes_masks,
            beams=beams,
        )
        self.backend.limits.validate(requests[0])
        return PreparedPrompt(requests, StopAutomaton(tuple(requests[0].params.stop)))

    def submit(
        self,
        prompt: Prompt | PreparedPrompt,
        sampling_params: GenerationParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        output_kind: OutputKind | None = None,
        lora_request: LoRARequest | str | None = None,
        **level: Unpack[LevelOptions],
    ) -> RequestHandle:
        """Queue one prompt, in the event loop. When this returns, the request is valid and queued; iterate
        over the handle, then close it.

        Args:
            prompt, sampling_params: as for `generate`; or, as prompt alone, the result of `prepare`.
            request_id: as for `generate`. The others: see RequestOptions.
            lora_request: an adapter that `loras.load` or `generate` has loaded.

        Raises:
            InvalidArgument: the prompt or a parameter is invalid, or too large. Nothing has been queued.
            EngineDead: the engine has failed, or was closed.
        """
        self._check_usable()
        output_kind = output_kind or getattr(sampling_params, "output_kind", None) or "cumulative"
        _check_options(request_id, timeout, output_kind)
        service, adapter = ServiceLevel(**level), self.loras.name(lora_request)
        self._bind()
        self._check_id(request_id)
        prepared = prompt if isinstance(prompt, PreparedPrompt) else self.prepare(prompt, sampling_params)
        requests, key = prepared.requests, prepared.requests[0].request_id
        if request_id is None:
            self._check_id(request_id := key)
        service.apply(requests)
        for request in requests:
            request.lora_name = adapter
        self.backend.add(*requests)  # updates are delivered in a later iteration of the event loop
        output = self._live.open(requests, prepared.stops)
        output.request_id = request_id
        end, settle = partial(self._end, key), partial(self._settle, key)
        handle = RequestHandle(output, output_kind, end, self._forget, settle, self._interval)
        self._handles[request_id] = handle
        if timeout is not None:
            handle.timer = asyncio.get_running_loop().call_later(timeout, handle.abort, "timeout")
        return handle

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may have, prompt and output together."""
        return self.backend.limits.sequence.max_model_len

    def _check_usable(self) -> None:
        check_process(self._pid)
        if self._dead is not None:
            raise EngineDead(f"the engine has stopped: {self._dead!r}") from self._dead
        if self._closing:
            raise EngineDead("the engine has been closed")

    def _order(self, operation: Operation[Any], done: Done) -> None:
        self._check_usable()
        operation.check(self.backend.limits)
        self.backend.do(operation, done)

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
            self.backend.end(*ended)
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
            self.backend.quit(wait=False)
            self._fail(error)

    def _died(self, error: BaseException) -> None:
        self._dead = error  # set first, so that further requests are rejected immediately
        self._post(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self._dead = error
        for handle in self._handles.values():
            handle.fail(error)
        self._fail_asked(EngineDead(f"the engine has stopped: {error!r}"))

    def _fail_asked(self, error: EngineDead) -> None:
        for pending in self._pending:
            _resolve(pending, None, error)

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        """Calls a function in the event loop, from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: no caller is waiting
                self._loop.call_soon_threadsafe(call, *arguments)


def _resolve[T](pending: asyncio.Future[T], answer: T, error: Exception | None) -> None:
    if pending.done():  # the caller may have been cancelled
        return
    if error is None:
        pending.set_result(answer)
    else:
        pending.set_exception(error)


def _check_options(request_id: object, timeout: object, output_kind: object) -> None:
    if output_kind not in OUTPUT_KINDS:
        raise InvalidArgument("output_kind", output_kind, f"must be one of {', '.join(OUTPUT_KINDS)}")
    if timeout is not None:
        check_number("timeout", timeout, 0.0, math.inf, "a finite number of seconds, at least 0")
    if request_id is not None and not isinstance(request_id, str):
        raise InvalidArgument("request_id", request_id, "must be text")
