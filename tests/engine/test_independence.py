"""In float32, a request's tokens do not depend on other requests, on its chunks, or on preemptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from jengine import BeamSearchParams
from jengine.core.beam_outputs import sampling_of
from jengine.core.request import Request, SamplingParams
from jengine.core.updates import BeamsFound, TokenUpdate
from jengine.engine.loop.engine import Engine
from jengine.scheduling.costs.step_costs import SwapCosts
from tests.engine.running import limit_pages, overlapped_steps, prompts, requests_of, run

LENGTH = 40  # tokens generated
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=LENGTH),
    SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=-3, max_tokens=LENGTH),
    SamplingParams(temperature=1.3, seed=2**64 - 2, max_tokens=LENGTH, logprobs=2),
]
LARGER = {"max_num_seqs": 32, "tile_size": 16, "max_num_batched_tokens": 32 + 32, "num_pages": 400}
WORK = [
    (prompt, dataclasses.replace(PARAMS[i % 4]))
    for i, prompt in enumerate(prompts(32, vocab=96, longest=140))
]


@pytest.fixture(scope="module")
def alone(make_engine: Callable[..., Engine]) -> list[list[int]]:
    engine = make_engine()
    return [run(engine, [work])[0].tokens for work in WORK]


def test_in_a_batch_of_32(alone: list[list[int]], make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(**LARGER)
    seen = []
    dispatch = engine.runner.dispatch
    engine.runner.dispatch = lambda plan: (
        seen.append(engine.scheduler.table.place(plan.spans).rows) or dispatch(plan)
    )  # type: ignore[method-assign,func-returns-value]
    assert [answer.tokens for answer in run(engine, WORK)] == alone
    assert max(seen) > 16, "the programs for 32 rows were never used"
    assert engine.compiles_since_start == 0


def test_in_chunks_of_one_small_tile(alone: list[list[int]], make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(**LARGER)
    engine.scheduler.predictor.max_num_batched_tokens = 24  # one tile a step
    assert [answer.tokens for answer in run(engine, WORK[16:])] == alone[16:]
    steps = len(engine.records.steps)
    assert steps > sum(-(-len(prompt) // 16) for prompt, _ in WORK[16:]), "prompts were not cut"


def test_preempted_and_resumed(alone: list[list[int]], make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    limit_pages(engine, 18)
    assert [answer.tokens for answer in run(engine, WORK)] == alone
    assert engine.scheduler.registry.num_preemptions > 5, "the pool was too large to force anything"


def test_without_overlap(alone: list[list[int]], make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(overlap=False)
    assert [answer.tokens for answer in run(engine, WORK[:8])] == alone[:8]
    overlapped, steps = overlapped_steps(engine)
    assert steps > LENGTH and overlapped == 0


@pytest.mark.full
def test_with_bursts_beams_and_a_host_tier(
    alone: list[list[int]], make_engine: Callable[..., Engine]
) -> None:
    """All at once, in a cache that is too small; the second time, much of it is in the host's memory."""
    engine = make_engine(optimized=True, num_scheduler_steps=8, swap_space=0.05)
    bursts, dispatch = [], engine.runner.dispatch
    engine.runner.dispatch = lambda plan: bursts.append(plan.steps > 1) or dispatch(plan)  # type: ignore[method-assign,func-returns-value]

    def search(number: int) -> Request:
        params = BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True)
        return Request(
            request_id=f"beams {number}",
            prompt_token_ids=[*range(number, 70)],
            params=sampling_of(params),
            beams=params,
        )

    def answers(requests: list[Request]) -> dict[str, list[object]]:
        found: dict[str, list[object]] = {request.request_id: [] for request in requests}
        for request in requests:
            engine.add(request)
        while engine.has_work:
            for update in engine.step():
                assert isinstance(update, TokenUpdate | BeamsFound)
                new = (
                    [update.token]
                    if isinstance(update, TokenUpdate)
                    else [beam.tokens for beam in update.beams]
                )
                found[update.request_id] += new
            engine.scheduler.check_integrity()
        return found

    searches = [search(number) for number in range(4)]
    expected = {name: found for one in searches for name, found in answers([one]).items()}
    expected |= {f"{i}.0": list[object](tokens) for i, tokens in enumerate(alone)}
    limit_pages(engine, 26)
    engine.scheduler.predictor.costs.swaps = SwapCosts(0.0, 0.0, 0.0)
    for _ in range(2):
        requests = [request for i, work in enumerate(WORK) for request in requests_of(str(i), *work)]
        for number, one in enumerate(searches):
            requests.insert(9 * number + 3, one)
        assert answers(requests) == expected
    tier = engine.scheduler.blocks.tier
    assert (
        tier is not None
        and tier.fetched > 10
        and engine.scheduler.registry.num_preemptions > 2
        and sum(bursts) > 10
    )
    assert engine.compiles_since_start == 0


def test_seeds(make_engine: Callable[..., Engine]) -> None:
    """The same seed repeats, another differs, and so do both halves of a 64-bit one; without seeds the
    engine's decides.
    """
    engine, prompt = make_engine(), [1, 2, 3]

    def tokens(seed: int | None, of: Engine = engine) -> list[int]:
        return run(of, [(prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH))])[0].tokens

    assert tokens(5) == tokens(5)
    assert len({tuple(tokens(seed)) for seed in (5, 6, 5 + 2**32, 5 + 2**63)}) == 4
    assert tokens(None) != tokens(None)
    once, again, other = (tokens(None, make_engine(seed=seed)) for seed in (1, 1, 2))
    assert once == again != other
