"""Methods of LLM and AsyncLLM for weights that change while the engine runs."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine.api.llm_requests import LLMRequests
from jengine.api.token_scores import Scorer, TokenLists, given_requests, logprobs_of, scores
from jengine.core.weights import TAGS, PauseMode, Tag, Version
from jengine.engine.loop.pausing import idle
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

if TYPE_CHECKING:  # an AsyncLLM over a remote engine needs no jax
    from jengine.api.shared_engine import SharedEngine
    from jengine.engine.setup.started import Started

POLL_SECONDS = 0.005  # between two questions whether running requests have finished


class RolloutMethods(LLMRequests):
    """LLM's. All raise EngineDead as `generate`."""

    _shared: SharedEngine
    started: Started

    @property
    def weights_version(self) -> Version:
        """The version of the weights that steps use: 0 at the start; see `update_weights`."""
        return self._shared.engine.weights_version

    @property
    def abstract_params(self) -> Any:
        """The parameters that programs take: nested dicts of jax.ShapeDtypeStruct with shardings."""
        return self._shared.engine.weights.params

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
            weights: all of the model's, as `params` of `start_engine`: by a checkpoint's names, in the
                model's dtype or float32, copied; or by the names of `abstract_params`, shared with the caller
                where they fit. Or a folder with model.safetensors, or with shards and their index.
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
        return self._shared.do(_update(weights)(weights, version, check_finite, keep_cache))

    def score_tokens(
        self, prompts: TokenLists, completions: TokenLists, *, use_tqdm: bool = False
    ) -> list[list[float]]:
        """Log probabilities of given completions, from the raw logits, computed as `generate` computes those
        of its own: with batch_invariant=True, they equal a rollout's to the last bit. Scoring with
        prompt_logprobs is faster, but computes completions as prompts, so last bits differ.

        Raises:
            InvalidArgument: a prompt or completion is empty, invalid or too long; or logprobs_mode is not
                raw_logprobs. Nothing has been run.
            JengineError: `pause` or `sleep` has aborted it.
        """
        limits, mode = self._shared.limits, self.started.logprobs_mode
        work = given_requests(prompts, completions, limits, mode, self._requests)
        outputs = self._wait_for(work, "scoring", use_tqdm)
        return [*map(logprobs_of, completions, outputs)]

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop working on requests until `resume`. Requests that arrive meanwhile wait.

        Args:
            mode: what becomes of running requests. abort: they end, with finish_reason "abort" and
                stop_reason "paused"; wait: this call returns when they have finished; keep: they stop, and
                go on where they were after `resume`.

        Raises:
            InvalidArgument: there is no such mode.
        """
        self._shared.do(Pause(mode))
        self._shared.step_until(partial(_idle, self._shared))

    def resume(self) -> None:
        """End a pause. Raises InvalidArgument if the engine sleeps, or has no weights."""
        self._shared.do(Resume())

    def is_paused(self) -> bool:
        """Whether the engine is paused, or sleeps."""
        return self._shared.do(GetPauseState()).paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort", tags: Iterable[Tag] = TAGS) -> None:
        """Pause, and give memory back until `wake_up`. The cache is dropped; programs stay.

        Args:
            level: 1 moves the weights to the host's memory, which on a CPU holds them already; 2 drops them,
                so the engine then needs `update_weights`. Shared weights stay at level 1.
            mode: as for `pause`, unless the engine is paused already. Requests that are kept compute their
                tokens again.
            tags: what to free.

        Raises:
            InvalidArgument: there is no such level, mode or tag.
        """
        operation = Sleep(level, mode, tuple(tags))
        while not self._shared.do(operation):
            self._shared.step_until(partial(_idle, self._shared))

    def wake_up(self, tags: Iterable[Tag] | None = None) -> None:
        """Take back what `sleep` has freed, or some of it. The engine goes on when it has everything, unless
        it was paused before. Raises InvalidArgument if there is no such tag.
        """
        self._shared.do(WakeUp(TAGS if tags is None else tuple(tags)))

    def is_sleeping(self) -> bool:
        """Whether `sleep` has freed something that `wake_up` has not taken back."""
        return bool(self._shared.do(GetPauseState()).asleep)


class AsyncRolloutMethods(ABC):
    """AsyncLLM's; see LLM, also for errors. An engine in another process takes weights from a folder only,
    and does not score tokens.
    """

    @abstractmethod
    async def do[T](self, operation: Operation[T]) -> T:
        """Has the engine do an operation, and returns its answer."""

    async def update_weights(self, weights: Any, version: Version | None = None, **how: bool) -> Version:
        """Replace the weights. how: check_finite, keep_cache."""
        return await self.do(_update(weights)(weights, version, **how))

    async def score_tokens(self: Scorer, prompts: TokenLists, completions: TokenLists) -> list[list[float]]:
        """Log probabilities of given completions. Cancelling this aborts the requests."""
        return await scores(self, prompts, completions)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop working on requests until `resume`."""
        await self.do(Pause(mode))
        while not (await self.do(GetPauseState())).idle:
            await asyncio.sleep(POLL_SECONDS)

    async def resume(self) -> None:
        """End a pause."""
        await self.do(Resume())

    async def is_paused(self) -> bool:
        """Whether the engine is paused, or sleeps."""
        return (await self.do(GetPauseState())).paused

    async def sleep(self, level: int = 1, mode: PauseMode = "abort", tags: Iterable[Tag] = TAGS) -> None:
        """Pause, and give memory back until `wake_up`."""
        operation = Sleep(level, mode, tuple(tags))
        while not await self.do(operation):
            await asyncio.sleep(POLL_SECONDS)

    async def wake_up(self, tags: Iterable[Tag] | None = None) -> None:
        """Take back what `sleep` has freed."""
        await self.do(WakeUp(TAGS if tags is None else tuple(tags)))

    async def is_sleeping(self) -> bool:
        """Whether something is freed."""
        return bool((await self.do(GetPauseState())).asleep)


def _update(weights: Any) -> type[UpdateWeights | LoadWeights]:
    """The operation for arrays, or for a folder."""
    return LoadWeights if isinstance(weights, str | Path) else UpdateWeights


def _idle(shared: SharedEngine) -> bool:
    from jengine.engine.ranks import ranks_of  # imports jax

    return all(map(idle, ranks_of(shared.engine)))
