"""Methods of LLM and AsyncLLM for weights that change while the engine runs."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine.api.prompts import Prompt
from jengine.base.checks import check_whole
from jengine.base.errors import InvalidArgument
from jengine.core.request import Request, RequestOutput, SamplingParams
from jengine.core.weights import TAGS, PauseMode, Tag, Version
from jengine.engine.operations import (
    GetPauseState,
    LoadWeights,
    Operation,
    Pause,
    Resume,
    Sleep,
    UpdateWeights,
    WakeUp,
)
from jengine.engine.pausing import idle
from jengine.text.masks import GivenTokens

if TYPE_CHECKING:  # an AsyncLLM over a remote engine needs no jax
    from jengine.api.shared_engine import SharedEngine
    from jengine.engine.start import Started

POLL_SECONDS = 0.005  # between two questions whether running requests have finished


class RolloutMethods(ABC):
    """LLM's."""

    _shared: SharedEngine
    started: Started

    @property
    def weights_version(self) -> Version:
        """Of the weights that steps use: 0 at the start; see `update_weights`. Raises EngineDead after
        `close`.
        """
        return self._shared.engine.weights_version

    @property
    def abstract_params(self) -> Any:
        """The parameters that programs take: nested dicts of jax.ShapeDtypeStruct with shardings. Arrays that
        fit these are used without a copy. Raises EngineDead after `close`.
        """
        return self._shared.engine.weights.params

    def update_weights(
        self,
        weights: Any,
        version: Version | None = None,
        *,
        check_finite: bool = False,
        keep_cache: bool = False,
    ) -> Version:
        """Replace the weights between two steps, without compilation. Needs weight_updates=True.

        All of the model's weights must be given, except those of a draft model, which keeps its own. They are
        checked before anything changes. Each parameter's old array is freed before the new one is made.
        Quantized parameters are quantized on the devices, as at the start.

        Cached pages are forgotten. Running requests go on with the new weights: they compute their tokens so
        far again, so what follows is what the new weights would generate after them. A request's
        prompt_logprobs stay as they were computed. `CompletionOutput.weights_versions` says which version
        made which token.
        Call `pause` first to end requests, or to wait for them.

        Args:
            weights: as `params` of `start_engine`: arrays by a checkpoint's names, of the model's dtype or
                float32, which are copied; or by the names of `abstract_params`, which the engine shares with
                the caller if they fit.
            version: a name for these weights; None: the number after the current one.
            check_finite: reject weights that are infinite or NaN. Looks at every number, on the host.
            keep_cache: running requests keep the keys and values that earlier weights computed for their
                tokens so far, instead of computing them again.

        Returns:
            The version.

        Raises:
            InvalidArgument: `weights` are no arrays by name, the version is invalid, or the engine takes no
                updates. Nothing has changed.
            ModelError: a tensor is missing, unknown, or has another shape or dtype, or is not finite; the
                message names it. Nothing has changed.
            EngineDead: as `generate`.
        """
        return self._shared.do(UpdateWeights(weights, version, check_finite, keep_cache))

    @abstractmethod
    def _requests(self, prompt: Prompt, params: SamplingParams | None) -> list[Request]:
        """Creates and validates a prompt's requests."""

    @abstractmethod
    def _wait_for(self, work: list[list[Request]], desc: str, show: bool) -> list[RequestOutput]:
        """Returns the outputs of prompts' requests when all have ended."""

    def score_tokens(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        *,
        use_tqdm: bool = False,
    ) -> list[list[float]]:
        """Log probabilities of given completions, computed as `generate` computes those of its own: prompts
        in tiles, completions in rows, with the same sampler.

        With batch_invariant=True, they equal the log probabilities of a rollout with the same weights to the
        last bit. Scoring with prompt_logprobs is faster, but computes completions in tiles, as prompts, so
        its last bits differ.

        Args:
            prompts, completions: token ids, as many of each; none is empty.

        Returns:
            For each completion, the natural logarithm of each token's probability, from the raw logits.

        Raises:
            InvalidArgument: a prompt or completion is invalid, or too long for this engine; or the engine's
                logprobs_mode is not raw_logprobs. Nothing has been run.
            EngineDead: as `generate`.
        """
        if len(prompts) != len(completions):
            raise InvalidArgument("completions", f"{len(completions)} completions", f"must be {len(prompts)}")
        if self.started.logprobs_mode != "raw_logprobs":
            limit = "must be raw_logprobs to score: with it, a token that is given has probability 1"
            raise InvalidArgument("logprobs_mode", self.started.logprobs_mode, limit)
        work, limits = [], self._shared.limits
        most = limits.sequence.max_model_len
        for prompt, completion in zip(prompts, completions, strict=True):
            if not len(completion):
                raise InvalidArgument("completions", completion, "each must have at least one token")
            for token in completion:
                check_whole("completions", token, 0, limits.vocab_size - 1)
            if len(prompt) + len(completion) > most:
                limit = f"at most max_model_len = {most} with their prompts"
                raise InvalidArgument("completions", f"{len(completion)} tokens", limit)
            params = SamplingParams(
                temperature=0.0, logprobs=0, max_tokens=len(completion), ignore_eos=True, detokenize=False
            )
            [request] = self._requests([*prompt], params)
            request.mask = GivenTokens([*completion])
            work.append([request])
        outputs = self._wait_for(work, "scoring", use_tqdm)
        return [
            [entry[token].logprob for token, entry in zip(completion, found, strict=True)]
            for completion, output in zip(completions, outputs, strict=True)
            if (found := output.outputs[0].logprobs) is not None
        ]

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop working on requests until `resume`. Requests that arrive meanwhile wait, and are answered
        then.

        Args:
            mode: what becomes of the requests that are there. abort: they end, with finish_reason "abort" and
                stop_reason "paused"; wait: they finish first, and this call returns then; keep: they wait,
                too, and go on where they were.

        Raises:
            InvalidArgument: there is no such mode.
            EngineDead: as `generate`.
        """
        self._shared.do(Pause(mode))
        self._shared.step_until(lambda: idle(self._shared.engine))

    def resume(self) -> None:
        """End a pause.

        Raises:
            InvalidArgument: the engine sleeps, or has no weights.
            EngineDead: as `generate`.
        """
        self._shared.do(Resume())

    def is_paused(self) -> bool:
        """Whether the engine is paused, or sleeps. Raises EngineDead after `close`."""
        return self._shared.do(GetPauseState()).paused

    def sleep(
        self, level: int = 1, mode: PauseMode = "abort", tags: Iterable[Tag] = ("weights", "kv_cache")
    ) -> None:
        """Pause, if the engine is not paused yet, and give memory back until `wake_up`. Programs stay:
        nothing is compiled again.

        The cache is dropped. Requests that `keep` keeps compute their tokens again.

        Args:
            level: 1 moves the weights to the host's memory, which on a CPU holds them already; 2 drops them,
                so that the engine needs `update_weights` before it goes on. Weights that the caller shares
                (see `update_weights`) stay where they are at level 1.
            mode: as for `pause`.
            tags: what to free.

        Raises:
            InvalidArgument: there is no such level, mode or tag.
            EngineDead: as `generate`.
        """
        operation = Sleep(level, mode, tuple(tags))
        while not self._shared.do(operation):
            self._shared.step_until(lambda: idle(self._shared.engine))

    def wake_up(self, tags: Iterable[Tag] | None = None) -> None:
        """Take back what `sleep` has freed, or a part of it. The engine goes on when it has everything,
        unless it was paused before it went to sleep.

        Args:
            tags: weights, kv_cache; None: both.

        Raises:
            InvalidArgument: there is no such tag.
            EngineDead: as `generate`.
        """
        self._shared.do(WakeUp(TAGS if tags is None else tuple(tags)))

    def is_sleeping(self) -> bool:
        """Whether `sleep` has freed something that `wake_up` has not taken back. Raises EngineDead after
        `close`.
        """
        return bool(self._shared.do(GetPauseState()).asleep)


class AsyncRolloutMethods(ABC):
    """AsyncLLM's. Arrays do not travel: an engine in another process takes weights from a folder."""

    @abstractmethod
    async def do[T](self, operation: Operation[T]) -> T:
        """See AsyncLLM."""

    async def update_weights(
        self,
        weights: Any,
        version: Version | None = None,
        *,
        check_finite: bool = False,
        keep_cache: bool = False,
    ) -> Version:
        """Replace the weights between two steps; see `LLM.update_weights`, also for errors."""
        return await self.do(UpdateWeights(weights, version, check_finite, keep_cache))

    async def load_weights(
        self,
        folder: str | Path,
        version: Version | None = None,
        *,
        check_finite: bool = False,
        keep_cache: bool = False,
    ) -> Version:
        """Replace the weights by those of a folder that the engine's process can read, which has
        model.safetensors, or shards and their index; see `LLM.update_weights`, also for errors.
        """
        return await self.do(LoadWeights(str(folder), version, check_finite, keep_cache))

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop working on requests until `resume`; see `LLM.pause`, also for errors."""
        await self.do(Pause(mode))
        while not (await self.do(GetPauseState())).idle:
            await asyncio.sleep(POLL_SECONDS)

    async def resume(self) -> None:
        """End a pause. Raises as `LLM.resume`."""
        await self.do(Resume())

    async def is_paused(self) -> bool:
        """Whether the engine is paused, or sleeps. Raises EngineDead after `close`."""
        return (await self.do(GetPauseState())).paused

    async def sleep(
        self, level: int = 1, mode: PauseMode = "abort", tags: Iterable[Tag] = ("weights", "kv_cache")
    ) -> None:
        """Pause, and give memory back until `wake_up`; see `LLM.sleep`, also for errors."""
        operation = Sleep(level, mode, tuple(tags))
        while not await self.do(operation):
            await asyncio.sleep(POLL_SECONDS)

    async def wake_up(self, tags: Iterable[Tag] | None = None) -> None:
        """Take back what `sleep` has freed; see `LLM.wake_up`, also for errors."""
        await self.do(WakeUp(TAGS if tags is None else tuple(tags)))

    async def is_sleeping(self) -> bool:
        """Whether something is freed. Raises EngineDead after `close`."""
        return bool((await self.do(GetPauseState())).asleep)
