"""Engines that share pages, compared with one that does not; counts of their operations."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any

import numpy as np

from jengine.core.request import SamplingParams
from jengine.core.updates import TokenUpdate
from jengine.engine.loop.engine import Engine
from jengine.execution.kinds import DeviceCall, call_kind
from jengine.execution.runner import Runner
from jengine.insight.recording.step_recorder import StepRecorder
from tests.engine.running import Answer, Work, limit_pages, requests_of, run

LENGTH = 12  # tokens generated
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=LENGTH),
    SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=-3, max_tokens=LENGTH),
    SamplingParams(temperature=1.3, seed=2**64 - 2, max_tokens=LENGTH, logprobs=2),
]


def params(number: int, **changes: Any) -> SamplingParams:
    """One of four kinds: greedy, plain, truncated, or with log probabilities."""
    return dataclasses.replace(PARAMS[number % 4], **changes)


class Sharing:
    """An engine whose tokens must be those of requests that run alone and share nothing.

    Attributes:
        calls: of the worker since `fresh`, by what they do; "pages copied" counts the copies' pages.

    Args:
        cold: of the same model, without a prefix cache.
    """

    def __init__(self, engine: Engine, cold: Engine) -> None:
        assert engine.scheduler.blocks.prefix_caching and not cold.scheduler.blocks.prefix_caching
        self.engine, self.cold = engine, cold
        self.calls: Counter[str] = Counter()
        self._alone: dict[tuple[tuple[int, ...], str], list[list[int]]] = {}
        runner = engine.runner
        assert isinstance(runner, Runner)
        self.runner, self.num_pages = runner, runner.spec.num_pages
        execute = runner.worker.execute

        def counting(call: DeviceCall) -> Any:
            what = call_kind(call.key).name
            self.calls[what] += 1
            if what == "copy":
                assert call.array is not None
                self.calls["pages copied"] += int(np.count_nonzero(call.array[1]))
            return execute(call)

        runner.worker.execute = counting  # type: ignore[method-assign]

    @property
    def groups(self) -> tuple[int | None, ...]:
        """Their windows."""
        return self.engine.scheduler.blocks.windows

    @property
    def windows(self) -> bool:
        return any(window is not None for window in self.groups)

    def most_pages(self, tokens: int) -> int:
        """Maximum pages that a sequence holds until it has this many tokens."""
        return self.engine.scheduler.limits.most_pages(tokens)

    def fresh(self, pages: int | None = None) -> Engine:
        """The engine with an empty cache of this many pages, without the null page, and counts at zero."""
        engine, scheduler = self.engine, self.engine.scheduler
        limit_pages(engine, self.num_pages if pages is None else pages + 1)
        scheduler.registry.num_preemptions = scheduler.prefixes.queries = scheduler.prefixes.hits = 0
        engine.records = StepRecorder(scheduler, overlap=engine.overlap)
        self.calls.clear()
        return engine

    def check(self, work: List[Work], each_step: Callable[[], object] = lambda: None) -> list[list[Answer]]:
        """Runs requests together, and returns each one's samples. Fails if a sample's tokens differ from
        those it gets alone.
        """
        answers = iter(run(self.engine, work, each_step))
        found = [[next(answers) for _ in range(one[1].n)] for one in work]
        for (prompt, how, *_), samples in zip(work, found, strict=True):
            assert [answer.tokens for answer in samples] == self.alone(prompt, how), (prompt, how)
            for answer in samples:
                assert {update.cached for update in answer.updates} == {answer.sequence.num_cached}
        return found

    def alone(self, prompt: list[int], how: SamplingParams) -> list[list[int]]:
        """Tokens of each sample, run alone on the engine without a cache."""
        key = tuple(prompt), repr(how)
        if key not in self._alone:
            engine, tokens = self.cold, []
            for request in requests_of("alone", prompt, how):
                engine.add(request)
                answer = []
                while engine.has_work:
                    answer += [update.token for update in engine.step() if isinstance(update, TokenUpdate)]
                tokens.append(answer)
            self._alone[key] = tokens
        return self._alone[key]


def check_equal(found: List[Answer], expected: List[Answer]) -> None:
    """Checks that tokens are equal, except for a sampled one at a near-tie in a thousand: the programs round
    differently, and a draw on the border of two tokens takes the one or the other. What follows it differs,
    too.
    """
    ties = 0
    for one, other in zip(found, expected, strict=True):
        if one.tokens != other.tokens:
            token, instead = next((a, b) for a, b in zip(one.tokens, other.tokens, strict=False) if a != b)
            assert one.sequence.request.params.temperature == 1.0 and abs(token - instead) == 1, (
                token,
                instead,
            )
            ties += 1
    assert ties <= sum(len(answer.tokens) for answer in found) / 1000


def cached(answers: List[Answer]) -> list[int]:
    """Number of tokens that each request did not compute."""
    return [answer.sequence.num_cached for answer in answers]


def mixed(count: int, *, vocab: int, seed: int, masks: bool) -> list[Work]:
    """Requests of every sort, most of which begin as others do, or go on from where others ended.

    Args:
        masks: among them such as allow few tokens; their steps wait for the steps before.
    """
    rng = np.random.default_rng(seed)

    def some(least: int, most: int) -> list[int]:
        return [int(token) for token in rng.integers(0, vocab, rng.integers(least, most + 1))]

    beginnings = [some(16, 110) for _ in range(6)]
    work: list[Work] = []
    for number in range(count):
        prompt = [*beginnings[rng.integers(6)], *some(0, 40)] if rng.random() < 0.7 else some(1, 30)
        changes: dict[str, Any] = {
            "max_tokens": int(rng.integers(1, 20 if len(prompt) > 30 else 60)),
            "n": int(rng.choice([1, 1, 1, 2, 4])) if number % 4 else 1,
        }
        if rng.random() < 0.1:
            changes |= {"n": 1, "prompt_logprobs": 1}
        if masks and rng.random() < 0.2:
            changes |= {"allowed_token_ids": some(5, 20)}
        work.append((prompt, params(number, **changes), rng.choice(["a", None, None, None])))
    return work
