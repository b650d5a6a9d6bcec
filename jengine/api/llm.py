"""The offline interface: a model as a Python object."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from jax.sharding import Mesh

from jengine.api.chat import ChatOptions, Conversation, chat_prompt, conversations, split_options
from jengine.api.embedding_methods import LLMEmbeddings
from jengine.api.engine_methods import EngineMethods
from jengine.api.llm_beams import LLMBeams
from jengine.api.llm_engine import LLMEngine
from jengine.api.llm_facts import facts_of, stats_of
from jengine.api.loras import LoraRequests, Loras
from jengine.api.metrics import get_metrics
from jengine.api.prompts import Prompt, TokensPrompt, listed, make_requests
from jengine.api.request_handle import tokens_of
from jengine.api.rollout_methods import RolloutMethods
from jengine.api.shared_engine import SharedEngine, ThreadCall
from jengine.api.vllm_methods import VllmMethods
from jengine.base.checks import check_whole
from jengine.base.display import Summary
from jengine.base.errors import EngineDead, InvalidArgument
from jengine.base.progress import progress_bar
from jengine.core.beam_params import BeamSearchParams
from jengine.core.config import EngineConfig
from jengine.core.engine_options import EngineOptions
from jengine.core.lora import LoRARequest
from jengine.core.pooling import PoolingParams
from jengine.core.request import Request, RequestOutput, SamplingParams
from jengine.core.service_level import BatchLevelOptions, ServiceLevel, levels, one_each
from jengine.engine.ranks import AnyEngine
from jengine.engine.start import start_engine
from jengine.parallel.mesh import with_mesh_size
from jengine.scheduling.forecasts.expectations import expect, hypothetical
from jengine.scheduling.forecasts.forecast import Prediction
from jengine.scheduling.scheduler import Scheduler
from jengine.vllm.translate import accepts


class LLMChatOptions(ChatOptions, BatchLevelOptions, total=False):
    """LLM.chat's keywords."""


class LLM(EngineMethods, RolloutMethods, LLMEmbeddings, LLMBeams, VllmMethods):
    """A model, loaded and compiled, ready for prompts.

    Any number of threads may call one LLM: their requests share batches, and each call returns when its own
    requests have ended. A process that is forked later cannot use the LLM.

    Args:
        model: `demo`, a folder in Hugging Face's layout, a GGUF file, or a hub id: owner/name, or
            owner/name:Q4_K_M for one of its GGUF files.
        mesh: the devices to use, see `start_engine`; tensor_parallel_size is their number.
        params: weights in place of the folder's, see `start_engine`.
        progress: show bars while loading and compiling.
        options: fields of EngineConfig.

    Raises:
        InvalidArgument: an unknown option, or a value out of range.
        ModelError: the model cannot be read, or is not supported.
        OutOfMemory: the device is too small.

    Examples:
        >>> with LLM("demo") as llm:
        ...     llm.generate("def fib(n):", SamplingParams(temperature=0.0))[0].outputs[0].text
    """

    get_metrics, llm_engine = get_metrics, cached_property(LLMEngine)

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        mesh: Mesh | None = None,
        params: Any = None,
        progress: bool = True,
        **options: Unpack[EngineOptions],
    ) -> None:
        config = EngineConfig.of(str(model), with_mesh_size(dict(options), mesh))
        self.model = config.model
        self._interval = config.stream_interval
        engine, self.started = start_engine(config, mesh=mesh, params=params, progress=progress, offline=True)
        self.tokenizer = self.started.require_tokenizer()
        self._shared = SharedEngine(engine, self.tokenizer)
        self.loras = Loras(self._shared.do)
        self._default_params = self.started.default_sampling_params
        self._ids = itertools.count()

    @accepts
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoraRequests = None,
        **level: Unpack[BatchLevelOptions],
    ) -> list[RequestOutput]:
        """Complete every prompt. Returns the outputs in the order of the prompts.

        Args:
            prompts: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these. A dict
                may also have images, as "multi_modal_data", and a "cache_salt": its prompt then shares cached
                pages only with prompts of the same salt.
            sampling_params: one for all prompts, or one each; None is `get_default_sampling_params()`.
            lora_request: the adapter of all prompts, or one each: a LoRARequest, which is loaded at its first
                use, or the name of a loaded one; None is the model alone.
            level: priority, ttft_ms, tpot_ms and client: one for all prompts, or one each; see ServiceLevel.

        Raises:
            InvalidArgument: a prompt or parameter is invalid, or too large for this engine. Nothing has been
                run.
            ModelError: an adapter cannot be loaded.
            EngineDead: the LLM was closed, or a step has failed, perhaps in another thread.
        """
        each = listed(prompts)
        params = one_each("sampling_params", sampling_params, len(each))
        names, every = self.loras.names(lora_request, len(each)), levels(len(each), level)
        work = [
            self._requests(prompt, sampling, level, lora_name=name)
            for prompt, sampling, level, name in zip(each, params, every, names, strict=True)
        ]
        return self._wait_for(work, "generating", use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | str | None = None,
    ) -> Generator[RequestOutput]:
        """Complete one prompt. Yields the same, growing output object after each step that added tokens
        (`stream_interval` or more).

        The object grows only while you wait for the next one. Closing the iterator early aborts the request.

        Raises:
            InvalidArgument: at the call, as `generate`.
            EngineDead: as `generate`.
        """
        if isinstance(prompt, list) and any(not isinstance(item, int) for item in prompt):
            raise InvalidArgument(
                "prompt", prompt, "must be one prompt: text or a list of token ids; generate takes several"
            )
        [name] = self.loras.names(lora_request, 1)
        return self._follow(self._requests(prompt, sampling_params, lora_name=name))

    @accepts
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoraRequests = None,
        **options: Unpack[LLMChatOptions],
    ) -> list[RequestOutput]:
        """Answer every conversation, with the model's chat template. Returns the outputs in the order of the
        conversations.

        Args:
            messages: dicts with "role" and "content", or a list of such conversations.
            sampling_params, lora_request: as for `generate`.
            options: how a conversation becomes a prompt, see ChatOptions; and as for `generate`, see
                ServiceLevel.

        Raises:
            InvalidArgument: a message, option or parameter is invalid, or too large for this engine. Nothing
                has been run.
            ModelError: the model has no chat template.
        """
        level, chat = split_options(options, BatchLevelOptions)
        prompts = [self.chat_prompt(conversation, **chat) for conversation in conversations(messages)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, **level)

    def predict(
        self,
        prompts: Prompt | Sequence[Prompt] = (),
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_tokens: int | Sequence[int] = (),
    ) -> list[Prediction]:
        """Predict the seconds until each of these prompts has its first and its last token, if `generate`
        were called with them now.

        The prediction uses the costs of steps, the running and waiting requests of other threads, and the
        cached pages. Outputs that may stop early are assumed to be as long as recent ones. Nothing is run.

        Args:
            prompts, sampling_params: as for `generate`.
            prompt_tokens: the length of a prompt, or several lengths, instead of prompts.

        Raises:
            InvalidArgument: as `generate`; or prompts and prompt_tokens are both given, or neither is.
            EngineDead: as `generate`.
        """
        lengths = [prompt_tokens] if isinstance(prompt_tokens, int) else [*prompt_tokens]
        each = prompts_or_lengths(prompts, lengths, self.max_model_len)
        params = one_each("sampling_params", sampling_params, len(each))
        work = [self._requests(prompt, sampling) for prompt, sampling in zip(each, params, strict=True)]
        return predicted(self.engine.scheduler, work, of_lengths=bool(lengths))

    def chat_prompt(self, messages: Conversation, **options: Unpack[ChatOptions]) -> TokensPrompt:
        """Make the prompt that `chat` would complete for one conversation, for `stream` or to count its
        tokens. Raises as `chat`.
        """
        return chat_prompt(self.tokenizer, messages, max_model_len=self.max_model_len, **options)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that pass none: the model's generation_config.json, unless
        generation_config is "vllm".

        SamplingParams that a request passes are used unchanged, without these defaults.
        """
        return self._default_params

    def wait_until_compiled(self, timeout: float | None = None) -> bool:
        """Wait until every program is ready, as with warm_up="all". Requests are served meanwhile.

        Args:
            timeout: in seconds.

        Returns:
            Whether all programs are ready.
        """
        done = self.engine.wait_until_compiled(timeout)
        self._shared.step_until(lambda: not self.engine.has_unused_programs)
        return done

    def close(self) -> None:
        """Free weights and cache. Calls in other threads end with EngineDead. May be called again."""
        self._shared.quit()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> AnyEngine:
        """The underlying engine, for tests and tools; use it in one thread, while no call runs. Raises
        EngineDead after `close`.
        """
        return self._shared.engine

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may have, prompt and output together."""
        return self._shared.limits.sequence.max_model_len

    @property
    def stats(self) -> dict[str, Any]:
        """Counters: what the start took, compilations since then (any is a bug), preemptions, cache hits,
        decisions and targets.
        """
        return stats_of(self.engine, self.started)

    def summary(self) -> Summary:
        """A description for terminals and notebooks. Notebooks keep what they show; unlike the LLM, this
        keeps no memory of a device.
        """
        try:
            return Summary("LLM", facts_of(self.model, self.engine, self.started))
        except EngineDead:
            return Summary("LLM", (("model", self.model), ("state", "closed")))

    def __repr__(self) -> str:
        return repr(self.summary())

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def _wait_for(self, work: list[list[Request]], desc: str, show: bool) -> list[RequestOutput]:
        """Returns the outputs of these requests when all have ended."""
        call = ThreadCall()
        try:
            self._shared.open(call, work)
            with progress_bar(total=len(work), desc=desc, unit="request", show=show) as bar:
                self._finish(call, bar)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # without the frames in which the step was interrupted
        finally:
            self._shared.close(call)
        return call.outputs

    def _requests(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        level: ServiceLevel | None = None,
        *,
        pooling: PoolingParams | None = None,
        beams: BeamSearchParams | None = None,
        lora_name: str | None = None,
    ) -> list[Request]:
        """Creates and validates a prompt's requests."""
        self._shared.check()
        params = self._default_params if params is None else params
        limits = self._shared.limits
        request_id, length = str(next(self._ids)), limits.sequence.max_model_len
        requests = make_requests(
            self.tokenizer, prompt, params, request_id, max_model_len=length, pooling=pooling, beams=beams
        )
        for request in requests:
            request.lora_name = lora_name
        limits.validate(requests[0])
        if level is not None:
            level.apply(requests)
        return requests

    def _finish(self, call: ThreadCall, bar: Any) -> None:
        """Works until all outputs have ended."""
        left, tokens, start = len(call.outputs), 0, time.perf_counter()
        while left:
            for output in self._shared.take(call):
                left -= 1
                tokens += _work_of(output)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
                bar.update()

    def _follow(self, requests: list[Request]) -> Generator[RequestOutput]:
        """Yields a prompt's output whenever it has grown, also when other threads step the engine."""
        call, ended, shown = ThreadCall(each_token=True), False, 0
        try:
            self._shared.open(call, [requests])
            while not ended:
                for output in self._shared.take(call):
                    ended, tokens = output.finished, tokens_of(output)
                    if ended or not shown or tokens - shown >= self._interval:
                        shown = tokens
                        yield output
        finally:
            self._shared.close(call)


def _work_of(output: RequestOutput) -> int:
    """Number of generated or embedded tokens."""
    return tokens_of(output) if output.embedding is None else len(output.prompt_token_ids)


def prompts_or_lengths(
    prompts: Prompt | Sequence[Prompt], lengths: list[int], max_model_len: int
) -> list[Prompt]:
    """The prompts, or prompts of these lengths.

    Raises:
        InvalidArgument: both are given, or neither is; or a length is out of range.
    """
    each = [] if prompts == () else listed(prompts)
    if bool(lengths) == bool(each):
        limit = "either prompts or their lengths must be given"
        raise InvalidArgument("prompt_tokens", lengths[0] if len(lengths) == 1 else lengths, limit)
    for length in lengths:
        check_whole("prompt_tokens", length, 1, max_model_len - 1)
    return each or [[0] * length for length in lengths]


def predicted(scheduler: Scheduler, work: list[list[Request]], *, of_lengths: bool) -> list[Prediction]:
    """Predictions for requests, by prompt. Nothing is cached for those of which only the length is known."""
    new = [hypothetical(scheduler, requests[0], len(requests)) for requests in work]
    return expect(scheduler, [one._replace(cached=0) for one in new] if of_lengths else new)
