"""The online interface: submit requests to a running engine, iterate over their outputs, abort them."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Iterable
from contextlib import ExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from jengine.api.async_requests import AsyncRequests
from jengine.api.backend import Backend, EngineThread
from jengine.api.chat import ChatOptions, Conversation, chat_prompt, split_options
from jengine.api.embeddings import EmbeddingRequestOutput
from jengine.api.loras import AsyncLoras
from jengine.api.prompts import PreparedPrompt, Prompt, is_slow, make_requests
from jengine.api.request_handle import OutputKind, RequestHandle, RequestOptions
from jengine.api.scoring import TokenLists, given_requests, logprobs_of
from jengine.api.vllm_methods import VllmMethods
from jengine.base.errors import InvalidArgument, JengineError
from jengine.core.beam_outputs import GenerationParams, split
from jengine.core.config import EngineConfig
from jengine.core.engine_options import EngineOptions
from jengine.core.lora import LoRARequest
from jengine.core.pooling import Pooling, require_embedder
from jengine.core.request import RequestOutput, SamplingParams
from jengine.core.service_level import LevelOptions, ServiceLevel
from jengine.core.updates import Load
from jengine.core.weights import TAGS, PauseMode, Tag, Version
from jengine.engine import operations
from jengine.engine.operations import Operation
from jengine.insight.explanations.explain import Explanation, explain
from jengine.insight.profiling.data import ProfileOptions
from jengine.insight.recording.cost_report import CostReport
from jengine.insight.recording.trace import Trace
from jengine.text.completion import StopAutomaton
from jengine.text.tokenizer import Tokenizer
from jengine.vllm.translate import accepts

if TYPE_CHECKING:
    from jax.sharding import Mesh

POLL_SECONDS = 0.005  # between two questions whether running requests have finished


class AsyncChatOptions(ChatOptions, RequestOptions, total=False):
    """AsyncLLM.chat's keywords."""


class AsyncLLM(VllmMethods):
    """A model that answers many requests at once, inside an asyncio event loop.

    The engine's loop runs in its own thread and handles tokens only; the event loop turns them into text. Use
    one event loop at a time: after it has been closed (asyncio.run has returned), you may continue in
    another. Calls raise EngineDead when the engine has failed or was closed.

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

        Outputs' prompt_logprobs are lazy sequences, not lists.
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
        self.backend, self.tokenizer = backend, tokenizer
        self._default_params = default_sampling_params
        self._ids = itertools.count()
        self._requests = AsyncRequests(self, backend, tokenizer, interval, lazy=lazy)
        # neither refers to this object, so that `del` frees it at once
        self.loras = AsyncLoras(self._requests.do, lambda: backend.limits)

    @property
    def load(self) -> Load:
        """How busy the engine is, as it last reported."""
        return self.backend.load

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
        """
        work: Prompt | PreparedPrompt = prompt
        grammar = (
            not self.backend.makes_masks and getattr(sampling_params, "structured_outputs", None) is not None
        )
        if grammar or is_slow(prompt):  # compiling a grammar may take a second
            work = await asyncio.to_thread(self.prepare, prompt, sampling_params)
        await self.loras.require(lora_request)  # last, since others may take its place
        handle = self.submit(
            work, sampling_params, request_id=request_id, lora_request=lora_request, **options
        )
        async with handle:
            async for output in handle:
                yield output

    @accepts
    async def chat(
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
            InvalidArgument: when the iteration begins; a message or option is wrong, or as `generate`.
            ModelError: the model has no chat template.
        """
        request, chat = split_options(options, RequestOptions)
        render = partial(chat_prompt, self.tokenizer, messages, max_model_len=self.max_model_len, **chat)
        prompt = await asyncio.to_thread(render)  # takes long with images, or if the conversation is long
        outputs = self.generate(prompt, sampling_params, request_id, lora_request=lora_request, **request)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, request_id: str | Iterable[str]) -> bool:
        """End requests, whose last outputs have finish_reason "abort". False: none of them runs."""
        return self._requests.abort(request_id)

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
        timeout: float | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> EmbeddingRequestOutput:
        """Embed one prompt. Cancelling this aborts the request.

        Args:
            pooling, normalize, dimensions: as for LLM.embed.
            request_id, priority, client, lora_request: as for `generate`.
            timeout: seconds, after which the request is aborted.

        Raises:
            InvalidArgument: it can never be answered, or the engine has no `embeddings`. Nothing has been
                queued.
            JengineError: the request was aborted.
        """
        prepare = partial(
            self.prepare_embedding, prompt, pooling=pooling, normalize=normalize, dimensions=dimensions
        )
        prepared = await asyncio.to_thread(prepare) if is_slow(prompt) else prepare()
        await self.loras.require(lora_request)
        handle = self.submit(
            prepared,
            request_id=request_id,
            priority=priority,
            client=client,
            timeout=timeout,
            output_kind="final",
            lora_request=lora_request,
        )
        async with handle:
            return EmbeddingRequestOutput.of(await anext(handle))

    async def do[T](self, operation: Operation[T]) -> T:
        """Have the engine do an operation of jengine.spi, such as SetStrategy, and return its answer.

        Raises:
            InvalidArgument: this engine cannot do it.
        """
        return await self._requests.do(operation)

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; running requests keep their pages. Returns True, as in vLLM."""
        return await self.do(operations.ResetPrefixCache())

    def set_strategy(self, strategy: str) -> None:
        """Change the strategy, from the next step on; see EngineConfig.strategy. May be called in any thread.

        Raises:
            InvalidArgument: there is no such strategy, or the engine's batching mode excludes it.
        """
        self._requests.order(operations.SetStrategy(strategy), lambda answer, error: None)

    async def trace(self, seconds: float | None = None) -> Trace:
        """Records of the engine's last `seconds` seconds, or all that are kept; see `LLM.trace`.

        Raises:
            InvalidArgument: `seconds` is not above 0.
        """
        return await self.do(operations.GetTrace(seconds))

    async def explain(self, seconds: float = 60.0) -> Explanation:
        """Bottlenecks of the engine in the last `seconds` seconds; see `LLM.explain`. Raises as `trace`."""
        return await asyncio.to_thread(explain, await self.trace(seconds))

    async def profile(self, options: ProfileOptions, folder: Path) -> None:
        """Makes the engine's process write its profile to files in this folder.

        An engine in this process writes none; tools such as py-spy profile this process.

        Raises:
            InvalidArgument: that process is already being profiled.
        """
        await self.do(operations.WriteProfile(options, str(folder), os.getpid()))

    def costs(self) -> CostReport:
        """Step costs on this machine; see `LLM.costs`.

        Raises:
            JengineError: the engine runs in another process.
        """
        engine: Any = getattr(self.backend, "engine", None)
        if not hasattr(engine, "costs"):
            raise JengineError("costs are not available here: the engine runs in another process")
        report: CostReport = engine.costs()
        return report

    async def update_weights(self, weights: Any, version: Version | None = None, **options: bool) -> Version:
        """Replace the weights as LLM.update_weights, also for errors. An engine in another process takes them
        from a folder only. options: check_finite, keep_cache.
        """
        return await self.do(operations.update_of(weights, version, **options))

    async def score_tokens(self, prompts: TokenLists, completions: TokenLists) -> list[list[float]]:
        """Log probabilities of given completions, as LLM.score_tokens. Cancelling this aborts the requests.
        An engine in another process does not score tokens.
        """
        if self.backend.makes_masks:  # which cannot be sent
            raise InvalidArgument("engine", "in another process", "does not score tokens")
        limits, mode = self.backend.limits, self.started.logprobs_mode
        work = given_requests(prompts, completions, limits, mode, lambda *each: self.prepare(*each).requests)
        with ExitStack() as stack:
            handles = []
            for requests in work:
                handles.append(self.submit(PreparedPrompt(requests, StopAutomaton()), output_kind="final"))
                stack.callback(handles[-1].close)
            outputs = [await anext(handle) for handle in handles]
        return [*map(logprobs_of, completions, outputs)]

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop working on requests until `resume`."""
        await self.do(operations.Pause(mode))
        while not (await self.do(operations.GetPauseState())).idle:
            await asyncio.sleep(POLL_SECONDS)

    async def resume(self) -> None:
        """End a pause."""
        await self.do(operations.Resume())

    async def is_paused(self) -> bool:
        """Whether the engine is paused, or sleeps."""
        return (await self.do(operations.GetPauseState())).paused

    async def sleep(self, level: int = 1, mode: PauseMode = "abort", tags: Iterable[Tag] = TAGS) -> None:
        """Pause, and give memory back until `wake_up`."""
        operation = operations.Sleep(level, mode, tuple(tags))
        while not await self.do(operation):
            await asyncio.sleep(POLL_SECONDS)

    async def wake_up(self, tags: Iterable[Tag] | None = None) -> None:
        """Take back what `sleep` has freed."""
        await self.do(operations.WakeUp(TAGS if tags is None else tuple(tags)))

    async def is_sleeping(self) -> bool:
        """Whether something is freed."""
        return bool((await self.do(operations.GetPauseState())).asleep)

    async def close(self, drain: float = 0.0) -> None:
        """Stop accepting requests, give running ones up to `drain` seconds to finish, abort the rest with
        stop_reason "shutdown", and end the engine's thread. May be called again.
        """
        await self._requests.close(drain)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine's thread, also from outside the event loop. Running requests fail with EngineDead;
        `close` aborts them.

        Args:
            timeout: accepted as in vLLM, and not used: the thread ends after its current step.
        """
        self._requests.quit()

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
        return self._prepared(prompt, params, beams=beams)

    def prepare_embedding(
        self,
        prompt: Prompt,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
    ) -> PreparedPrompt:
        """Like `prepare`, for an embedding; see `embed`. The embedding is in the last output of the handle
        returned by `submit`.

        Raises:
            InvalidArgument: it can never be answered, or the engine has no `embeddings`.
        """
        params = require_embedder(self.backend.limits.embedder).params(pooling, normalize, dimensions)
        return self._prepared(prompt, None, pooling=params)

    def _prepared(self, prompt: Prompt, params: SamplingParams | None, **options: Any) -> PreparedPrompt:
        request_id, masks = f"request-{next(self._ids)}", not self.backend.makes_masks
        length = self.max_model_len
        requests = make_requests(self.tokenizer, prompt, params, request_id, masks, length, **options)
        self.backend.limits.validate(requests[0])
        return PreparedPrompt(requests, StopAutomaton.of(tuple(requests[0].params.stop)))

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
        """
        output_kind = output_kind or getattr(sampling_params, "output_kind", None) or "cumulative"
        self._requests.check(request_id, timeout, output_kind)
        service, adapter = ServiceLevel(**level), self.loras.name(lora_request)
        prepared = prompt if isinstance(prompt, PreparedPrompt) else self.prepare(prompt, sampling_params)
        service.apply(prepared.requests)
        for request in prepared.requests:
            request.lora_name = adapter
        handle = self._requests.open(prepared, request_id, timeout, output_kind)
        handle.llm = self
        return handle

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may have, prompt and output together."""
        return self.backend.limits.sequence.max_model_len
