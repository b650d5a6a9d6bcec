"""Pages from the host give the same tokens and log probabilities as pages that stayed on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jengine.core.request import SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.execution.executor import Worker
from jengine.execution.runner import Runner
from jengine.scheduling.costs.step_costs import StepCosts, SwapCosts
from jengine.scheduling.pages.host_tier import HostTier
from tests.engine.invariance import OPTIONS
from tests.engine.running import Answer, limit_pages, overlapped_steps, run
from tests.engine.sharing import Sharing, cached, mixed, params
from tests.engine.test_sharing import some, whole

SPACE = 0.05  # GiB
CASES = [("gemma2", {})]  # full attention and windows
REST = [
    ("llama_gqa", {}),
    ("gemma2", {"kv_cache_dtype": "int8"}),
    ("qwen2_window", {}),
    ("llama_gqa", {"kv_cache_dtype": "fp8"}),
    ("gemma3", {}),
    ("deepseek_v2", {}),
]
pytestmark = pytest.mark.filterwarnings("ignore:kv_cache_dtype='fp8' is emulated")
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3)


@pytest.fixture(
    scope="module",
    params=[*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in REST)],
    ids=lambda case: "-".join((case[0], *case[1].values())),
)
def sharing(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> Sharing:
    variant, options = request.param
    options = {**options, "speculative_config": "none"}  # so that steps overlap
    sharing = Sharing(
        make_engine(variant, swap_space=SPACE, **options),
        make_engine(variant, enable_prefix_caching=False, **options),
    )
    prefer_fetching(sharing.engine)
    return sharing


def prefer_fetching(engine: Engine) -> None:
    engine.scheduler.predictor.costs.swaps = SwapCosts(0.0, 0.0, 0.0)


def tier_of(engine: Engine) -> HostTier:
    tier = engine.scheduler.blocks.tier
    assert tier is not None
    return tier


def settled(engine: Engine) -> None:
    """Waits until all spills have finished; the next step takes notice."""
    runner = engine.runner
    assert isinstance(runner, Runner)
    for one in runner._spilling:
        for array in one.arrays:
            array.block_until_ready()


def answer(engine: Engine, prompt: list[int], how: SamplingParams = LOGPROBS) -> Answer:
    [answer] = run(engine, [(prompt, how)])
    settled(engine)
    return answer


def test_bits_after_a_fetch(sharing: Sharing) -> None:
    """Compared with the same requests whose prefixes are on the device."""
    prompts = [some(90 + i, seed=i) for i in range(5)]
    engine = sharing.fresh()
    for prompt in prompts:
        answer(engine, prompt)
    found = [answer(engine, prompt) for prompt in prompts]
    assert cached(found) == [whole(len(prompt)) for prompt in prompts] and not tier_of(engine).fetched
    engine = sharing.fresh(sharing.most_pages(110))
    for prompt in prompts:
        assert cached([answer(engine, prompt)]) == [0]
    for prompt, on_device in zip(prompts, found, strict=True):
        fetched = answer(engine, prompt)
        assert cached([fetched]) == cached([on_device])
        assert [update.logprobs for update in fetched.updates] == [
            update.logprobs for update in on_device.updates
        ]
        assert fetched.tokens == on_device.tokens
    assert tier_of(engine).fetched > 20 and sharing.calls["fill"] > 4 and sharing.calls["stage"] > 4


def test_samples_copy_a_page_that_was_fetched(sharing: Sharing) -> None:
    """Copy on write together with fetches and spills."""
    engine = sharing.fresh(sharing.most_pages(100) + 4 * len(sharing.groups))
    prompts = [some(70 + i, seed=i) for i in range(4)]
    for _ in range(2):
        for i, prompt in enumerate(prompts):
            sharing.check([(prompt, params(1 + i % 3, n=3))])
            settled(engine)
    assert tier_of(engine).fetched > 8 and sharing.calls["pages copied"] >= 2 * 2 * 4


def test_preempted_sequences_resume_from_the_host(sharing: Sharing) -> None:
    """A pool for few of them: with the tier, fewer tokens are computed again."""
    work = [(some(5 + i, seed=i), params(i, max_tokens=60)) for i in range(16)]
    computed = []
    for swaps in (SwapCosts(0.0, 1e6, 0.0), SwapCosts(0.0, 0.0, 0.0)):
        engine = sharing.fresh(16 * len(sharing.groups))
        engine.scheduler.predictor.costs.swaps = swaps
        scheduler = engine.scheduler
        scheduler.prefixes.host_queries = scheduler.prefixes.host_hits = scheduler.prefixes.host_declined = 0
        sharing.check(work, lambda engine=engine: settled(engine))  # type: ignore[misc]
        assert scheduler.registry.num_preemptions > 2
        computed.append(scheduler.prefixes.queries - scheduler.prefixes.hits - scheduler.prefixes.host_hits)
        assert (tier_of(engine).fetched > 0) == (scheduler.prefixes.host_hits > 0) == (swaps.fetch == 0.0)
    assert computed[1] < computed[0]


def test_nothing_is_compiled_and_steps_overlap(sharing: Sharing) -> None:
    """Requests of every sort in a cache that is too small for them."""
    engine = sharing.fresh(sharing.most_pages(191) * 3 // 2)
    compiles = engine.compiles_since_start
    work = mixed(60, vocab=96, seed=2, masks=False)
    found = run(engine, work)
    assert engine.compiles_since_start == compiles
    assert tier_of(engine).fetched > 10 and engine.scheduler.registry.num_preemptions > 0
    overlapped, steps = overlapped_steps(engine)
    assert steps > 100 and overlapped >= 0.9 * steps
    assert [answer.tokens for answer in found] == [
        answer.tokens for answer in run(sharing.cold, [(p, how) for p, how, *_ in work])
    ]


def test_costs_are_measured_and_saved(sharing: Sharing) -> None:
    save: Any = sharing.engine._closing[0]
    costs = save.peek()[1].args[0]
    assert isinstance(costs, StepCosts) and costs.swaps is not None and min(costs.swaps) > 0.0
    again = StepCosts.from_json(costs.to_json())
    assert again.swaps == costs.swaps and again.fetch_seconds(17) == 2 * again.fetch_seconds(16) > 0.0


def test_load(sharing: Sharing) -> None:
    engine = sharing.fresh(sharing.most_pages(110))
    for _ in range(2):
        for i in range(4):
            answer(engine, some(80, seed=i))
    load, tier = engine.load, tier_of(engine)
    assert load.host_pages == tier.capacity > load.host_used > 0
    assert (load.host_spilled, load.host_fetched, load.host_evictions) == (tier.spilled, tier.fetched, 0)
    assert (
        load.host_fetched > 0
        and load.host_hits > 0
        and load.host_queries >= load.host_hits + load.host_declined
    )
    assert sharing.cold.load.host_pages == 0


def test_batch_invariant_bits(make_engine: Callable[..., Engine]) -> None:
    """A prompt's pages come back for a tile's end alone; generated tokens are repeated in rows."""
    engine = make_engine(optimized=True, dtype="bfloat16", swap_space=SPACE, **OPTIONS)
    prefer_fetching(engine)
    prompts = [some(90 + i, seed=i) for i in range(4)]
    alone = [answer(engine, prompt) for prompt in prompts]
    limit_pages(engine, 1 + engine.scheduler.limits.most_pages(110))
    for prompt in prompts:
        answer(engine, prompt)
    again = [answer(engine, prompt) for prompt in prompts]
    assert tier_of(engine).fetched > 0 and sum(cached(again)) > 0
    for one, other in zip(alone, again, strict=True):
        assert [(u.token, u.logprobs) for u in one.updates] == [(u.token, u.logprobs) for u in other.updates]


def test_off_by_default(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    runner = engine.runner
    assert isinstance(runner, Runner) and isinstance(runner.worker, Worker)
    assert engine.scheduler.blocks.tier is None and runner.worker.state.store is None
    assert "spill" not in runner.programs and "fill" not in runner.programs
    assert engine.load.host_pages == 0
