"""The offline interface: a model as a Python object."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from jax.sharding import Mesh

from jengine.api.chat import ChatOptions, Conversation, chat_prompt, conversations, split_options
from jengine.api.embeddings import EmbeddingRequestOutput, ScoringRequestOutput
from jengine.api.llm_requests import LLMRequests, SteppedRequests, facts_of, stats_of
from jengine.api.loras import LoraRequests, Loras
from jengine.api.metrics import get_metrics
from jengine.api.prompts import Prompt, TokensPrompt
from jengine.api.scoring import TokenLists, given_requests, logprobs_of, scoring_of
from jengine.api.shared_engine import SharedEngine
from jengine.api.vllm_methods import VllmMethods
from jengine.base.display import Summary
from jengine.base.errors import EngineDead, InvalidArgument
from jengine.core.beam_outputs import BeamSearchOutput
from jengine.core.beam_params import BeamSearchParams
from jengine.core.config import EngineConfig
from jengine.core.engine_options import EngineOptions
from jengine.core.lora import LoRARequest
from jengine.core.pooling import Pooling, require_embedder
from jengine.core.request import RequestOutput, SamplingParams
from jengine.core.service_level import BatchLevelOptions
from jengine.core.weights import TAGS, PauseMode, Tag, Version
from jengine.engine import operations
from jengine.engine.ranks import AnyEngine, ranks_of
from jengine.engine.start import start_engine
from jengine.insight.explanations.explain import Explanation, explain
from jengine.insight.recording.cost_report import CostReport
from jengine.insight.recording.trace import Trace
from jengine.parallel.mesh import with_mesh_size
from jengine.scheduling.forecasts.forecast import Prediction
from jengine.vllm.translate import accepts


class LLMChatOptions(ChatOptions, BatchLevelOptions, total=False):
    """LLM.chat's keywords."""


class LLM(VllmMethods):
    """A model, loaded and compiled, ready for prompts.

    Any number of threads may call one LLM: their requests share batches, and each call returns when its own
    requests have ended. A process that is forked later cannot use the LLM. Calls raise EngineDead after
    `close`, and when a step has failed, perhaps in another thread.

    Args:
        model: `demo`, a folder in Hugging Face's layout, a GGUF file, or a hub id: owner/name, or
            owner/name:Q4_K_M for one of its GGUF files.
        mesh: the devices to use, several along one axis only; tensor_parallel_size is their number.
        params: arrays in place of the folder's weights, by the names that `update_weights` takes.
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

    get_metrics = get_metrics

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
        engine, self.started = start_engine(config, mesh=mesh, params=params, progress=progress, offline=True)
        self.tokenizer = self.started.require_tokenizer()
        self._shared = SharedEngine(engine, self.tokenizer)
        self.loras = Loras(self._shared.do)
        self._default_params = self.started.default_sampling_params
        self._requests = LLMRequests(
            self._shared, self.tokenizer, self.loras, self._default_params, config.stream_interval
        )

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
        """
        work = self._requests.make(prompts, sampling_params, lora_request, level)
        return self._requests.run(work, "generating", use_tqdm)

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
        """
        if isinstance(prompt, list) and any(not isinstance(item, int) for item in prompt):
            raise InvalidArgument(
                "prompt", prompt, "must be one prompt: text or a list of token ids; generate takes several"
            )
        [name] = self.loras.names(lora_request, 1)
        return self._requests.stream(self._requests.make_one(prompt, sampling_params, lora_name=name))

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
        """
        return self._requests.predict(prompts, sampling_params, prompt_tokens)

    def chat_prompt(self, messages: Conversation, **options: Unpack[ChatOptions]) -> TokensPrompt:
        """Make the prompt that `chat` would complete, for `stream` or to count tokens. Raises as `chat`."""
        return chat_prompt(self.tokenizer, messages, max_model_len=self.max_model_len, **options)

    @accepts
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        client: str | list[str] | tuple[str, ...] = "",
        lora_request: LoraRequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds every prompt: one vector each, in `outputs.embedding`. Results are in the order of the
        prompts.

        Args:
            prompts, priority, client, lora_request: as for `generate`. Prompts are embedded as they are; add
                instructions yourself.
            pooling, normalize, dimensions: see PoolingParams. None uses the settings in the model's
                sentence-transformers files, or else the last token, normalized, with all dimensions.

        Raises:
            InvalidArgument: a prompt or parameter that can never be answered, or an engine without
                `embeddings`. Nothing has been run.
        """
        params = require_embedder(self._shared.limits.embedder).params(pooling, normalize, dimensions)
        level: BatchLevelOptions = {"priority": priority, "client": client}
        work = self._requests.make(prompts, None, lora_request, level, pooling=params)
        return [EmbeddingRequestOutput.of(each) for each in self._requests.run(work, "embedding", use_tqdm)]

    @accepts
    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Scores pairs of a query and a document, in `outputs.score`.

        An embedding model gives the cosine similarity, in [-1, 1], a reranker the probability that the
        document fits, in [0, 1], unless the model's files name another measure.

        Args:
            queries, documents: one query for all documents, or one query for each document.
            instruction: for rerankers; None uses the one in the model's files.
            lora_request: the adapter that computes both, as for `generate`.

        Raises:
            InvalidArgument: a text that can never be scored, or a model that cannot score. Nothing has been
                run.
        """
        limits = self._shared.limits
        scoring = scoring_of(queries, documents, instruction, limits, self.tokenizer)
        pooling = require_embedder(limits.embedder).params(None, None, None) if scoring.embeds else None
        [name] = self.loras.names(lora_request, 1)
        work = [
            self._requests.make_one(task.prompt(), task.params, pooling=pooling, lora_name=name)
            for task in scoring.tasks
        ]
        return scoring.results(self._requests.run(work, "scoring", use_tqdm))

    @accepts
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        lora_request: LoraRequests = None,
    ) -> list[BeamSearchOutput]:
        """Runs a beam search for every prompt. Results are in the order of the prompts.

        Args:
            prompts, lora_request: as for `generate`.
            concurrency_limit: maximum number of prompts searched at the same time; None: as many as fit.

        Raises:
            InvalidArgument: a prompt or parameter that can never be answered. Nothing has been run.
        """
        return self._requests.search(prompts, params, concurrency_limit, lora_request, use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; running requests keep their pages. Returns True, as in vLLM."""
        return self._shared.do(operations.ResetPrefixCache())

    def set_strategy(self, strategy: str) -> None:
        """Change the strategy, from the next step on; see EngineConfig.strategy.

        Raises:
            InvalidArgument: there is no such strategy, or this batching mode excludes it.
        """
        self._shared.do(operations.SetStrategy(strategy))

    def costs(self) -> CostReport:
        """Report what steps cost here: measured at warm-up, refined by every step, saved for the next start.
        Shown as a table, in a notebook with a plot if matplotlib is installed. Thread-safe.
        """
        return self.engine.costs()

    def trace(self, seconds: float | None = None) -> Trace:
        """Return what the engine did in the last `seconds`, or 8192 steps; see Trace. Thread-safe."""
        return self.engine.trace(seconds)

    def explain(self, seconds: float = 60.0) -> Explanation:
        """Find bottlenecks of the last `seconds`, options to change, and predicted effects. Thread-safe."""
        return explain(self.trace(seconds))

    @property
    def weights_version(self) -> Version:
        """The version of the weights that steps use: 0 at the start; see `update_weights`."""
        return self.engine.weights_version

    @property
    def abstract_params(self) -> Any:
        """The parameters that programs take: nested dicts of jax.ShapeDtypeStruct with shardings."""
        return self.engine.weights.params

    def update_weights(
        self,
        weights: Any,
        version: Version | None = None,
        *,
        check_finite: bool = False,
        keep_cache: bool = False,
    ) -> Version:
        """Replace the weights between two steps, without compilation. Needs weight_updates=True. All weights
        are checked before anything changes; each old parameter is freed before the new one is made.

        Cached pages are forgotten. Running requests go on with the new weights: they compute their tokens so
        far again, but not their prompt_logprobs. Call `pause` first to end them, or to wait for them.

        Args:
            weights: all of the model's arrays: by a checkpoint's names, in the model's dtype or float32,
                copied; or by the names of `abstract_params`, shared with the caller where they fit. Or a
                folder with model.safetensors, or with shards and their index.
            version: a name for these weights; None: the number after the current one.
            check_finite: reject infinity and NaN. Looks at every number, on the host.
            keep_cache: running requests keep the keys and values that earlier weights computed.

        Returns:
            The version; `CompletionOutput.weights_versions` says which one made which token.

        Raises:
            InvalidArgument: the weights are not arrays by name, or the version is invalid. Nothing has
                changed.
            ModelError: a tensor, which the message names, is missing, unknown, or has another shape or dtype,
                or is not finite. Nothing has changed.
        """
        return self._shared.do(operations.update_of(weights, version, check_finite, keep_cache))

    def score_tokens(
        self, prompts: TokenLists, completions: TokenLists, *, use_tqdm: bool = False
    ) -> list[list[float]]:
        """Log probabilities of the tokens of given completions, from the raw logits. They are computed as in
        `generate`: with batch_invariant=True, they equal a rollout's to the last bit. Scoring with
        prompt_logprobs is faster, but computes completions as prompts, so last bits differ.

        Raises:
            InvalidArgument: a prompt or completion is empty, invalid or too long; or logprobs_mode is not
                raw_logprobs. Nothing has been run.
            JengineError: `pause` or `sleep` has aborted it.
        """
        limits, mode = self._shared.limits, self.started.logprobs_mode
        work = given_requests(prompts, completions, limits, mode, self._requests.make_one)
        return [*map(logprobs_of, completions, self._requests.run(work, "scoring", use_tqdm))]

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop working on requests until `resume`. Requests that arrive meanwhile wait.

        Args:
            mode: what becomes of running requests. abort: they end, with finish_reason "abort" and
                stop_reason "paused"; wait: this call returns when they have finished; keep: they stop, and
                go on where they were after `resume`.

        Raises:
            InvalidArgument: there is no such mode.
        """
        self._shared.do(operations.Pause(mode))
        self._shared.step_until(self._is_idle)

    def resume(self) -> None:
        """End a pause. Raises InvalidArgument if the engine sleeps, or has no weights."""
        self._shared.do(operations.Resume())

    def is_paused(self) -> bool:
        """Whether the engine is paused, or sleeps."""
        return self._shared.do(operations.GetPauseState()).paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort", tags: Iterable[Tag] = TAGS) -> None:
        """Pause, and give memory back until `wake_up`. The cache is dropped; programs stay.

        Args:
            level: 1 moves the weights to the host's memory, which on a CPU holds them already; 2 drops them,
                so the engine then needs `update_weights`. Shared weights stay at level 1.
            mode: as for `pause`, unless the engine is paused already. Requests that are kept compute their
                tokens again.
            tags: what to free.

        Raises:
            InvalidArgument: there is no such level, mode or tag, or it is level 2 without weight_updates.
        """
        operation = operations.Sleep(level, mode, tuple(tags))
        while not self._shared.do(operation):
            self._shared.step_until(self._is_idle)

    def wake_up(self, tags: Iterable[Tag] | None = None) -> None:
        """Take back what `sleep` has freed, or some of it. The engine goes on when it has everything, unless
        it was paused before. Raises InvalidArgument if there is no such tag.
        """
        self._shared.do(operations.WakeUp(TAGS if tags is None else tuple(tags)))

    def is_sleeping(self) -> bool:
        """Whether `sleep` has freed something that `wake_up` has not taken back."""
        return bool(self._shared.do(operations.GetPauseState()).asleep)

    def wait_until_compiled(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until every program is ready, as with warm_up="all", while requests
        are served. Returns whether all are.
        """
        done = self.engine.wait_until_compiled(timeout)
        self._shared.step_until(lambda: not self.engine.has_unused_programs)
        return done

    def _is_idle(self) -> bool:
        """Whether a paused engine has finished the requests that it should."""
        return all(map(operations.idle, ranks_of(self.engine)))

    def close(self) -> None:
        """Free weights and cache. Calls in other threads end with EngineDead. May be called again."""
        self._shared.quit()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """An LLMEngine of this model."""
        return LLMEngine(self)

    @property
    def engine(self) -> AnyEngine:
        """The engine, for tests and tools; use it while no call runs. Raises EngineDead after `close`."""
        return self._shared.engine

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may have, prompt and output together."""
        return self._shared.limits.sequence.max_model_len

    @property
    def stats(self) -> dict[str, Any]:
        """Counters: programs, compilations since the start, preemptions, cache hits, targets and others."""
        return stats_of(self.engine, self.started)

    def summary(self) -> Summary:
        """A description for terminals and notebooks. Keeping it does not keep the model in memory."""
        try:
            return Summary("LLM", facts_of(self.model, self.engine, self.started))
        except EngineDead:
            return Summary("LLM", (("model", self.model), ("state", "closed")))

    def __repr__(self) -> str:
        return repr(self.summary())

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()


class LLMEngine(SteppedRequests):
    """A model that the caller steps, for scripts written for vLLM. Use it in one thread.

    Args:
        llm: the model. Its other methods may be used, too: all requests share batches.

    Examples:
        >>> engine = LLMEngine.from_engine_args(EngineArgs(model="demo"))
        >>> engine.add_request("0", "def fib(n):", SamplingParams(temperature=0.0))
        >>> while engine.has_unfinished_requests():
        ...     for output in engine.step():
        ...         print(output.outputs[0].text)
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm.loras, llm._requests, llm._shared)
        self.llm = llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **more: Any) -> LLMEngine:
        """Load the model of these options. Raises as LLM.from_engine_args."""
        return cls(LLM.from_engine_args(engine_args, **more))
