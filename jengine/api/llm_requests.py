"""Requests of LLM: of its calls, whose threads wait for them, and of a caller that steps the engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jengine.api.embeddings import EmbeddingRequestOutput
from jengine.api.loras import LoraRequests, Loras
from jengine.api.prompts import Prompt, listed, make_requests
from jengine.api.request_handle import OutputKind, lengths, snapshot, tokens_of
from jengine.api.shared_engine import SharedEngine, ThreadCall
from jengine.base.display import counted
from jengine.base.errors import InvalidArgument
from jengine.base.options import check_whole
from jengine.base.progress import progress_bar
from jengine.core.beam_outputs import BeamSearchOutput, BeamSearchSequence, sampling_of
from jengine.core.beam_params import BeamSearchParams
from jengine.core.lora import LoRARequest
from jengine.core.pooling import PoolingParams
from jengine.core.request import CompletionOutput, Request, RequestOutput, SamplingParams
from jengine.core.service_level import BatchLevelOptions, ServiceLevel, levels, one_each
from jengine.core.updates import Load
from jengine.engine.ranks import AnyEngine, ranks_of
from jengine.engine.setup.prepare import Started
from jengine.scheduling.forecasts.expectations import expect, hypothetical
from jengine.scheduling.forecasts.forecast import Prediction
from jengine.text.tokenizer import Tokenizer
from jengine.vllm.translate import accepts


@dataclass(eq=False)
class LLMRequests:
    """Makes and validates requests, and runs them in the calling thread.

    Args:
        default_params: of prompts without sampling parameters.
        interval: see EngineConfig.stream_interval.
    """

    _shared: SharedEngine
    _tokenizer: Tokenizer
    _loras: Loras
    _default_params: SamplingParams
    _interval: int
    _ids: Iterator[int] = field(default_factory=itertools.count, init=False)

    def make(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        lora_request: LoraRequests = None,
        level: BatchLevelOptions | None = None,
        *,
        pooling: PoolingParams | None = None,
        beams: BeamSearchParams | None = None,
    ) -> list[list[Request]]:
        """The requests of each prompt. Loads adapters that are not loaded yet."""
        each = listed(prompts)
        every, all_levels = one_each("sampling_params", params, len(each)), levels(len(each), level or {})
        work = [
            self.make_one(prompt, params, level, pooling=pooling, beams=beams)
            for prompt, params, level in zip(each, every, all_levels, strict=True)
        ]
        # last, since an adapter without requests may have to make room for another thread's
        for requests, name in zip(work, self._loras.names(lora_request, len(each)), strict=True):
            for request in requests:
                request.lora_name = name
        return work

    def make_one(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        level: ServiceLevel | None = None,
        *,
        pooling: PoolingParams | None = None,
        beams: BeamSearchParams | None = None,
        lora_name: str | None = None,
    ) -> list[Request]:
        """One prompt's requests, with the adapter of this name, which is loaded."""
        self._shared.check()
        params = self._default_params if params is None else params
        limits = self._shared.limits
        request_id, length = str(next(self._ids)), limits.sequence.max_model_len
        requests = make_requests(
            self._tokenizer, prompt, params, request_id, max_model_len=length, pooling=pooling, beams=beams
        )
        for request in requests:
            request.lora_name = lora_name
        limits.validate(requests[0])
        if level is not None:
            level.apply(requests)
        return requests

    def run(self, work: list[list[Request]], desc: str, show: bool) -> list[RequestOutput]:
        """Returns the outputs of prompts' requests when all have ended. desc, show: the progress bar's label,
        and whether to show it.
        """
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

    def _finish(self, call: ThreadCall, bar: Any) -> None:
        """Works until all outputs have ended."""
        left, tokens, start = len(call.outputs), 0, time.perf_counter()
        while left:
            for output in self._shared.take(call):
                left -= 1
                tokens += tokens_of(output) if output.embedding is None else len(output.prompt_token_ids)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
                bar.update()

    def stream(self, requests: list[Request]) -> Generator[RequestOutput]:
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

    def search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        concurrency_limit: int | None,
        lora_request: LoraRequests,
        show: bool,
    ) -> list[BeamSearchOutput]:
        """LLM.beam_search."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidArgument("params", params, "must be a BeamSearchParams")
        if concurrency_limit is not None:
            check_whole("concurrency_limit", concurrency_limit, 1, None)
        sampling = sampling_of(params, logprobs=2 * params.beam_width)
        work = self.make(prompts, sampling, lora_request, beams=params)
        return [
            BeamSearchOutput([self._beam(output, beam, params) for beam in output.outputs])
            for batch in itertools.batched(work, concurrency_limit or max(len(work), 1))
            for output in self.run([*batch], "searching", show)
        ]

    def _beam(
        self, output: RequestOutput, beam: CompletionOutput, params: BeamSearchParams
    ) -> BeamSearchSequence:
        tokens = [*output.prompt_token_ids, *beam.token_ids]
        hides_stop = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=beam.logprobs or [],
            cum_logprob=beam.cumulative_logprob or 0.0,
            text=self._tokenizer.decode(tokens[:-1] if hides_stop else tokens),
            finish_reason=beam.finish_reason,
        )

    def predict(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        prompt_tokens: int | Sequence[int],
    ) -> list[Prediction]:
        """LLM.predict."""
        lengths = [prompt_tokens] if isinstance(prompt_tokens, int) else [*prompt_tokens]
        each = [] if prompts == () else listed(prompts)
        if bool(lengths) == bool(each):
            limit = "either prompts or their lengths must be given"
            raise InvalidArgument("prompt_tokens", lengths[0] if len(lengths) == 1 else lengths, limit)
        for length in lengths:
            check_whole("prompt_tokens", length, 1, self._shared.limits.sequence.max_model_len - 1)
        scheduler = self._shared.engine.scheduler
        work = self.make(each or [[0] * length for length in lengths], params)
        new = [hypothetical(scheduler, requests[0], len(requests)) for requests in work]
        # nothing is cached for prompts of which only the length is known
        return expect(scheduler, [request._replace(cached=0) for request in new] if lengths else new)


def stats_of(engine: AnyEngine, started: Started) -> dict[str, Any]:
    load, schedulers = engine.load, [rank.scheduler for rank in ranks_of(engine)]
    return {
        "programs_compiled": started.programs_compiled,
        "programs_loaded": started.programs_loaded,
        "programs_ready": load.programs_ready,
        "programs": started.programs,
        "compiles_since_start": engine.compiles_since_start,
        "start_seconds": dict(started.seconds),
        "preemptions": sum(scheduler.registry.num_preemptions for scheduler in schedulers),
        "prefix_cache_queries": sum(scheduler.prefixes.queries for scheduler in schedulers),
        "prefix_cache_hits": sum(scheduler.prefixes.hits for scheduler in schedulers),
        "external_prefix_cache_queries": load.host_queries,
        "external_prefix_cache_hits": load.host_hits,
        "swapped_out_pages": load.host_spilled,
        "swapped_in_pages": load.host_fetched,
        "page_store": None if load.store is None else load.store._asdict(),
        "strategy": load.strategy,
        "decisions": dict(load.decisions),
        "targets": {name: getattr(load, f"targets_{name}") for name in ("met", "missed", "rejected")},
    }


def facts_of(model: str, engine: AnyEngine, started: Started) -> tuple[tuple[str, str], ...]:
    """Names and values for LLM.summary."""
    ranks = ranks_of(engine)
    scheduler, each = ranks[0].scheduler, " of each rank" if len(ranks) > 1 else ""
    blocks, max_num_seqs = scheduler.blocks, scheduler.registry.max_num_seqs
    return (
        ("model", model),
        ("numbers", started.dtype),
        ("devices", started.devices),
        ("kernels", started.kernels),
        ("programs", _programs(engine.load)),
        ("cache", f"{counted(blocks.capacity, 'page')} of {blocks.page_size} tokens{each}"),
        ("limits", f"{max_num_seqs} sequences at once{each}, {scheduler.limits.max_model_len} tokens each"),
    )


def _programs(load: Load) -> str:
    of = "" if load.programs_ready == load.programs else f"{load.programs_ready} of "
    return of + counted(load.programs, "program")


class _Added(NamedTuple):
    """A request. `shown`: what its outputs have had so far, if they are deltas."""

    call: ThreadCall
    kind: OutputKind
    shown: dict[int, tuple[int, int]]


class SteppedRequests:
    """Requests that a caller adds, while it steps the engine. Used by one thread."""

    def __init__(self, loras: Loras, requests: LLMRequests, shared: SharedEngine) -> None:
        self._loras, self._requests, self._shared = loras, requests, shared
        self._added: dict[str, _Added] = {}

    @accepts
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        lora_request: LoRARequest | str | None = None,
        priority: int = 0,
    ) -> None:
        """Queue one prompt.

        Args:
            request_id: of its outputs, and for `abort_request`; must not be in use.
            prompt, lora_request, priority: as for LLM.generate.
            params: SamplingParams; PoolingParams for an embedding. None is the LLM's default. Their
                output_kind says what `step` returns: everything so far, what is new, or the end only.

        Raises:
            InvalidArgument: as LLM.generate. Nothing has been queued.
        """
        if request_id in self._added:
            raise InvalidArgument("request_id", request_id, "is in use")
        [adapter] = self._loras.names(lora_request, 1)
        pooling, sampling = (params, None) if isinstance(params, PoolingParams) else (None, params)
        level = ServiceLevel(priority=priority)
        requests = self._requests.make_one(prompt, sampling, level, pooling=pooling, lora_name=adapter)
        added = _Added(ThreadCall(each_token=True), getattr(params, "output_kind", None) or "cumulative", {})
        self._shared.open(added.call, [requests])
        self._added[request_id] = added

    def step(self) -> list[RequestOutput | EmbeddingRequestOutput]:
        """Step the engine until a request has got tokens. Returns the outputs of those that have; they do not
        change later. Without requests, returns at once.

        Raises:
            EngineDead: the engine has failed, or was closed.
        """
        added = [*self._added.items()]
        if added:
            self._shared.step_until(lambda: any(request.call.news for _, request in added))
        outputs: list[RequestOutput | EmbeddingRequestOutput] = []
        for request_id, (call, kind, shown) in added:
            for output in self._shared.take(call) if call.news else ():
                news = snapshot(output, shown)
                news.request_id = request_id
                if kind == "delta":
                    shown |= lengths(output)
                if output.finished:
                    self.abort_request(request_id)
                if output.finished or kind != "final":
                    outputs.append(news if news.embedding is None else EmbeddingRequestOutput.of(news))
        return outputs

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests, which have no further output. Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else [*request_id]:
            if (request := self._added.pop(name, None)) is not None:
                self._shared.close(request.call)

    def has_unfinished_requests(self) -> bool:
        return bool(self._added)

    def get_num_unfinished_requests(self) -> int:
        return len(self._added)
