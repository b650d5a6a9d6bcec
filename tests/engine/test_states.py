"""Recurrent states do not change tokens: alone, together, in chunks, preempted, from snapshots, with samples,
and in bursts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from jengine.core.request import SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.scheduling.requests.policy import victim
from tests.engine.running import Work, limit_pages, prompts, run
from tests.engine.sharing import Sharing, cached, params
from tests.engine.test_golden import assert_equal
from tests.golden.weights import Golden

VARIANT, TILE = "qwen3_next", 64
FULL = 3  # of params: its sampler alone is compiled, as states do not depend on what is sampled how
OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 4 + 64}  # chunks of one tile


@pytest.fixture(scope="module")
def sharing(make_engine: Callable[..., Engine]) -> Sharing:
    return Sharing(
        make_engine(VARIANT, **OPTIONS), make_engine(VARIANT, **OPTIONS, enable_prefix_caching=False)
    )


def test_states_over_chunks_and_from_snapshots_against_transformers(sharing: Sharing) -> None:
    """130 tokens in three chunks of a tile, beside others; then from the snapshots that the first two
    left.
    """
    engine, cases = sharing.fresh(), Golden.read(VARIANT).cases
    work: list[Work] = [
        (case.prompt.tolist(), SamplingParams(temperature=0.0, max_tokens=24, logprobs=20)) for case in cases
    ]
    for hits in ([0, 0, 0, 0], [0, 0, 64, 128]):
        answers = run(engine, work)
        for answer, case in zip(answers, cases, strict=True):
            assert_equal(answer, case)
        assert cached(answers) == hits
    assert engine.scheduler.blocks.hit_pages["state"] == 2 and engine.compiles_since_start == 0


def test_preempted_at_any_time(sharing: Sharing) -> None:
    """Resumed from a snapshot, or computed again: states are of all tokens before, generated ones among
    them.
    """
    scheduler, step = sharing.fresh().scheduler, itertools.count()

    def preempt() -> None:
        if next(step) % 7 == 6 and scheduler.registry.num_running > 1:
            scheduler.registry.preempt(victim(scheduler.registry.running))

    sharing.check(
        [(prompt, params(FULL, max_tokens=30)) for prompt in prompts(5, vocab=64, longest=140, seed=4)],
        preempt,
    )
    assert scheduler.registry.num_preemptions > 3 and scheduler.blocks.hit_pages["state"] > 0


def test_samples_begin_with_one_state(sharing: Sharing) -> None:
    [prompt] = prompts(1, vocab=64, longest=100, seed=5)
    sharing.fresh()
    [answers] = sharing.check([(prompt, params(FULL, n=4))])
    assert (
        cached(answers) == [0] + [len(prompt)] * 3 and len({tuple(answer.tokens) for answer in answers}) == 4
    )


@pytest.mark.full
def test_many_in_few_pages_and_states(sharing: Sharing) -> None:
    engine = sharing.fresh()
    limit_pages(engine, 26, num_states=1 + 6)
    samples = [1 + i % 3 if i % 4 else 1 for i in range(24)]
    work: list[Work] = [
        (prompt, params(i, n=n, max_tokens=40))
        for i, (prompt, n) in enumerate(zip(prompts(24, vocab=64, longest=140), samples, strict=True))
    ]
    sharing.check([*work, *work[::-1]])
    assert engine.scheduler.registry.num_preemptions > 1 and engine.scheduler.blocks.evictions > 20


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"num_scheduler_steps": 8, "tile_size": 16}, {"overlap": False, "tile_size": 8}, {"tile_size": 96}],
)
def test_in_other_programs(
    options: dict[str, object], sharing: Sharing, make_engine: Callable[..., Engine]
) -> None:
    tile = options["tile_size"]
    engine = make_engine(VARIANT, **{"max_num_seqs": 8, **options, "max_num_batched_tokens": 8 + 2 * tile})  # type: ignore[operator]
    seen, dispatch = list[int](), engine.runner.dispatch
    engine.runner.dispatch = lambda plan: seen.append(plan.steps) or dispatch(plan)  # type: ignore[method-assign,func-returns-value]
    work: list[Work] = [
        (prompt, params(i, max_tokens=40))
        for i, prompt in enumerate(prompts(10, vocab=64, longest=140, seed=6))
    ]
    for _ in range(2):
        for answer, (prompt, how, *_) in zip(run(engine, work), work, strict=True):
            assert [answer.tokens] == sharing.alone(prompt, how)
    assert (max(seen) > 1) == ("num_scheduler_steps" in options) and engine.scheduler.blocks.hit_pages[
        "state"
    ] > 0
