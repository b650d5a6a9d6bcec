"""Compares requests that run alone and together, in all possible combinations, bit for bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as List
from typing import Any

import numpy as np

from jengine.core.request import SamplingParams
from jengine.core.updates import PromptScores, TokenUpdate
from jengine.engine.loop.engine import Engine
from jengine.scheduling.step_plan import StepPlan
from tests.engine.running import Work, limit_pages, requests_of

LONGEST = 191  # tokens, prompt and output
OPTIONS = {
    "batch_invariant": True,
    "max_num_seqs": 32,
    "tile_size": 16,
    "max_num_batched_tokens": 96,
    "num_pages": 400,
}
Answer = tuple[Any, ...]  # of a sample: see `answers`


def random_work(count: int, *, vocab: int, seed: int) -> list[Work]:
    """Requests with random lengths and parameters, many with common prefixes. Sampled ones have seeds."""
    rng = np.random.default_rng(seed)

    def some(least: int, most: int) -> list[int]:
        return [int(token) for token in rng.integers(0, vocab, rng.integers(least, most + 1))]

    beginnings, work = [some(16, 120) for _ in range(6)], []
    for _ in range(count):
        prompt = [*beginnings[rng.integers(6)], *some(0, 40)] if rng.random() < 0.6 else some(1, 160)
        most = 70 if rng.random() < 0.2 else 20
        how: dict[str, Any] = {
            "max_tokens": int(rng.integers(1, min(most, LONGEST - len(prompt)) + 1)),
            "temperature": 0.0,
        }
        if rng.random() < 0.7:
            how |= {
                "temperature": float(rng.uniform(0.3, 1.5)),
                "seed": int(rng.integers(2**62)),
                "n": int(rng.choice([1, 1, 2, 3])),
            }
        choices = {
            "top_k": int(rng.integers(1, 30)),
            "top_p": float(rng.uniform(0.5, 1)),
            "min_p": float(rng.uniform(0, 0.1)),
            "repetition_penalty": float(rng.uniform(0.8, 1.5)),
            "frequency_penalty": float(rng.uniform(-0.5, 1)),
            "presence_penalty": float(rng.uniform(-0.5, 1)),
            "logit_bias": {int(token): float(rng.uniform(-3, 3)) for token in rng.integers(0, vocab, 3)},
            "min_tokens": how["max_tokens"],
            "allowed_token_ids": sorted({*some(20, 60)}),
            "ignore_eos": True,
        }
        how |= {
            name: value
            for name, value in choices.items()
            if rng.random() < (0.05 if name == "allowed_token_ids" else 0.2)
        }
        how |= {"logprobs": int(rng.choice([0, 3]))} if rng.random() < 0.8 else {}
        how |= {"prompt_logprobs": 1} if rng.random() < 0.1 else {}
        work.append((prompt, SamplingParams(**how)))
    return work


class Observed:
    """An engine that records facts about its plans.

    Attributes:
        chunks: by prompt, the ways in which it was cut: positions where a step's chunk of it ended.
        repeated: rows that computed a known token again.
        beside: of the steps' decode rows, the most.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.chunks: dict[int, list[int]] = defaultdict(list)  # by sequence
        self.repeated = self.beside = 0
        self._begin = engine.runner.begin
        engine.runner.begin = self.begin  # type: ignore[method-assign]

    def begin(self, plan: StepPlan) -> Any:
        self.repeated += sum(span.length for span in plan.spans if span.known >= 0)
        self.beside = max(self.beside, sum(span.tokens is None for span in plan.spans))
        for span in plan.spans:
            if span.tokens is not None:
                self.chunks[span.seq].append(span.start + span.length)
        return self._begin(plan)

    def answers(
        self,
        work: List[Work],
        *,
        at_once: int = 1,
        seed: int = 0,
        pages: int | None = None,
        warm: bool = False,
    ) -> list[Answer]:
        """For each sample, tokens with log probability, rank and likeliest tokens; and the same for its
        prompt's tokens, by position. Samples that compute their prompt by themselves must have the same of
        it.

        Args:
            at_once: prompts, at most; their order and the steps at which they arrive are drawn by the seed.
            pages: of the cache, fewer than it has.
            warm: what was cached before may be found.
        """
        engine, rng = self.engine, np.random.default_rng(seed)
        if not warm:
            limit_pages(engine, engine.runner.spec.num_pages if pages is None else pages)  # type: ignore[attr-defined]
        found: dict[str, list[object]] = {}
        scored: dict[int, dict[int, object]] = defaultdict(dict)  # by prompt
        left, open_requests = [int(i) for i in rng.permutation(len(work))], 0
        while left or engine.has_work:
            while left and open_requests < at_once and (not engine.has_work or rng.random() < 0.6):
                number = left.pop()
                requests = requests_of(str(number), *work[number])
                found |= {request.request_id: [] for request in requests}
                open_requests += len(engine.add(*requests)) / len(requests)
            for update in engine.step():
                number = int(update.request_id.split(".")[0])
                if isinstance(update, PromptScores):
                    for position, scores in enumerate(update.logprobs, update.position):
                        assert scored[number].setdefault(position, scores) == scores
                elif isinstance(update, TokenUpdate):
                    found[update.request_id].append((update.token, update.logprobs))
                    if update.finish_reason is not None:
                        open_requests -= 1 / work[number][1].n
                else:
                    raise AssertionError(update)
            engine.scheduler.check_integrity()
        return [
            (found[f"{i}.{n}"], sorted(scored[i].items()))
            for i, (_, how) in enumerate(work)
            for n in range(how.n)
        ]


def differences(one: List[Answer], other: List[Answer]) -> int:
    """Samples that differ in a token or in a bit of a log probability. Python's floats represent float32
    exactly.
    """
    return sum(a != b for a, b in zip(one, other, strict=True))


def check_invariance(engine: Engine, count: int, *, seed: int = 0, stages: int = 1) -> None:
    """Forces every kind of combination, asserts that it occurred, and checks that results do not change.

    Args:
        stages: of a pipeline, which divides the requests among as many batches that run at once. Each has
            fewer rows, and fewer requests are preempted.
    """
    observed, scheduler = Observed(engine), engine.scheduler
    work = random_work(count, vocab=engine.model.vocab_size, seed=seed)
    alone = [answer for one in work for answer in observed.answers([one])]
    cut_alone = set(map(tuple, observed.chunks.values()))
    assert observed.beside <= 3, "a prompt's samples"

    observed.chunks.clear()
    assert differences(observed.answers(work, at_once=32, seed=seed), alone) == 0
    assert observed.beside > min(16, count // 2) // stages
    assert set(map(tuple, observed.chunks.values())) - cut_alone, "no prompt was cut in another way"

    before = scheduler.prefixes.hits
    assert differences(observed.answers(work, at_once=7, seed=seed + 1, warm=True), alone) == 0
    assert scheduler.prefixes.hits - before > 16 * count, "little was found in the cache"

    before = scheduler.registry.num_preemptions
    assert differences(preempted(observed, work, seed=seed), alone) == 0
    forced = scheduler.registry.num_preemptions - before
    least = count // 10 if stages == 1 else 1
    assert forced >= least and observed.repeated > 5 * least, "the pool was too large to force anything"
    assert engine.compiles_since_start == 0


def preempted(observed: Observed, work: List[Work], *, seed: int = 0) -> list[Answer]:
    """Runs the work in a pool hardly larger than the longest request needs."""
    pages = 1 + observed.engine.scheduler.limits.most_pages(LONGEST) * 9 // 8
    return observed.answers(work, at_once=31, seed=seed + 2, pages=pages)
