"""Sharing pages does not change tokens: each kind of sharing is forced, verified, and compared with requests
alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from jengine.engine.loop.engine import Engine
from jengine.engine.operations import ResetPrefixCache
from jengine.scheduling.requests.policy import victim
from tests.engine.running import Work, overlapped_steps, prompts, run
from tests.engine.sharing import LENGTH, Sharing, cached, check_equal, mixed, params

PAGE = 16
VARIANTS = ["llama_gqa", "gemma2"]  # full attention; windows beside it
# windows alone; as many layers of full attention as groups of windows; fewer; sinks; one latent vector a
# token
REST = ["mistral_window", "gemma3", "qwen2_window", "gpt_oss", "deepseek_v3"]


@pytest.fixture(
    scope="module", params=[*VARIANTS, *(pytest.param(variant, marks=pytest.mark.full) for variant in REST)]
)
def sharing(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> Sharing:
    # without drafts, steps overlap and sequences hold no page beyond the next token's
    options = {"speculative_config": "none"}
    return Sharing(
        make_engine(request.param, **options),
        make_engine(request.param, enable_prefix_caching=False, **options),
    )


def whole(tokens: int) -> int:
    """Number of a prompt's tokens saved if all of it is cached: whole pages, without the last token."""
    return (tokens - 1) // PAGE * PAGE


def some(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, count).tolist()


def test_prompts_that_begin_as_earlier_ones(sharing: Sharing) -> None:
    engine = sharing.fresh()
    work: list[Work] = [
        (prompt, params(i)) for i, prompt in enumerate(prompts(4, vocab=96, longest=70, seed=1))
    ]
    first = [answer for [answer] in sharing.check(work)]
    assert cached(first) == [0] * 4
    turns: list[Work] = [
        ([*prompt, *a.tokens, *some(20, i)], how)
        for i, (a, (prompt, how)) in enumerate(zip(first, work, strict=True))
    ]
    found = [answer for [answer] in sharing.check(turns)]
    assert cached(found) == [whole(len(prompt) + LENGTH) for prompt, _ in work], (
        "an output's last token is not computed"
    )
    again = [answer for [answer] in sharing.check(turns)]
    assert cached(again) == [whole(len(prompt)) for prompt, _ in turns]
    parts: list[Work] = [
        ([*turns[3][0][:40], *some(length, length)], params(length)) for length in (1, 8, 9, 60)
    ]
    assert cached([answer for [answer] in sharing.check(parts)]) == [32] * 4
    scheduler = engine.scheduler
    assert scheduler.prefixes.hits == sum(map(sum, (cached(found), cached(again), [32] * 4)))
    assert scheduler.blocks.evictions == scheduler.registry.num_preemptions == 0


def test_those_that_come_together_compute_their_common_beginning_once(sharing: Sharing) -> None:
    engine, beginning = sharing.fresh(), some(50, seed=2)
    answers = sharing.check([([*beginning, *some(3 * i, seed=i)], params(i)) for i in range(8)])
    assert cached([answer for [answer] in answers]) == [0] + [48] * 7
    assert engine.scheduler.prefixes.hits == 48 * 7


def test_evicted_and_computed_again(sharing: Sharing) -> None:
    """Six prompts in turn, of which the cache holds three or four."""
    engine = sharing.fresh(sharing.most_pages(90) * 3)
    work: list[Work] = [(prompt, params(i)) for i, prompt in enumerate(some(80, seed=i) for i in range(6))]
    found = []
    for pair in np.random.default_rng(0).integers(0, 6, (14, 2)):
        found += cached([answer for [answer] in sharing.check([work[i] for i in {*pair.tolist()}])])
    assert engine.scheduler.blocks.evictions > 20
    assert found.count(0) > 6, "nothing was computed again"
    assert engine.scheduler.prefixes.hits == sum(found) > 5 * PAGE


def test_samples_copy_the_page_that_their_prompt_ends_in(sharing: Sharing) -> None:
    engine = sharing.fresh()
    work: list[Work] = [
        (some(37, seed=3), params(1, n=3)),
        ([5], params(2, n=2)),
        (some(100, seed=4), params(3, n=2)),
    ]
    for one in work:
        sharing.calls.clear()
        n = one[1].n
        [answers] = sharing.check([one])
        assert cached(answers) == [0] + [len(one[0])] * (n - 1)
        assert len({tuple(answer.tokens) for answer in answers}) == n
        assert sharing.calls["pages copied"] == (n - 1) * len(sharing.groups), (
            "each but the last to write copies"
        )
        assert sharing.calls["update"] >= (n > 2), "three slots are set in a step of one tile"
    sharing.calls.clear()
    [answers] = sharing.check([(some(3 * PAGE, seed=5), params(1, n=4))])
    assert cached(answers) == [0] + [3 * PAGE] * 3 and not sharing.calls["copy"], (
        "a whole page is not written again"
    )
    assert engine.scheduler.registry.num_preemptions == 0
    sharing.check([*work, *work[::-1]])


def test_samples_are_preempted_with_their_pages_shared(sharing: Sharing) -> None:
    engine = sharing.fresh(12 * len(sharing.groups))
    sharing.check([(some(21 + i, seed=i), params(1 + i, n=4, max_tokens=60)) for i in range(3)])
    assert engine.scheduler.registry.num_preemptions > 3 and sharing.calls["pages copied"] > 3


def test_preempted_into_the_cache_and_resumed_from_there(sharing: Sharing) -> None:
    """Whenever the policy's last sequence is preempted, all its whole pages are found again, unless its last
    token is in flight.
    """
    scheduler, step, expected = sharing.fresh().scheduler, itertools.count(), 0

    def preempt() -> None:
        nonlocal expected
        if next(step) % 8 == 7 and scheduler.registry.num_running and not scheduler.registry.num_waiting:
            last = victim(scheduler.registry.running)
            scheduler.registry.preempt(last)
            known = len(last.tokens) + last.in_flight
            expected += whole(known) if known < last.max_len else 0

    answers = sharing.check([(some(30 + 5 * i, seed=i), params(i, max_tokens=40)) for i in range(4)], preempt)
    assert cached([answer for [answer] in answers]) == [0] * 4
    assert scheduler.registry.num_preemptions > 3 and scheduler.prefixes.hits == expected > 0


def test_preempted_in_a_pool_that_is_too_small(sharing: Sharing) -> None:
    scheduler = sharing.fresh(16 * len(sharing.groups)).scheduler
    sharing.check([(some(5 + i, seed=i), params(i, max_tokens=60)) for i in range(16)])
    assert scheduler.registry.num_preemptions > 2
    assert scheduler.prefixes.hits > 0 or sharing.windows, "what resumed found nothing"


def test_pages_behind_the_window_are_freed(sharing: Sharing) -> None:
    """The pool cannot hold every page of this sequence; it runs alone, and with another."""
    most, every = sharing.most_pages(191), 12 * len(sharing.groups)
    assert (most < every) == sharing.windows
    work: list[Work] = [
        (some(100, seed=6), params(0, max_tokens=92)),
        (some(160, seed=7), params(1, max_tokens=32)),
    ]
    for pages, together in ((most, work[:1]), (most, work), (most + 4, work)):
        sharing.fresh(pages)
        sharing.check(together)
    scheduler = sharing.fresh().scheduler
    owned: list[int] = []
    sharing.check(work[:1], lambda: owned.append(scheduler.blocks.owned))
    windows = sharing.groups
    assert max(owned[-40:]) <= sum(12 if window is None else -(-window // PAGE) + 1 for window in windows), (
        "what no token sees is held"
    )


def test_prompt_logprobs_are_computed(sharing: Sharing) -> None:
    sharing.fresh()
    prompt = some(60, seed=8)
    sharing.check([(prompt, params(0))])
    found = [sharing.check([(prompt, params(3, prompt_logprobs=2))])[0][0] for _ in range(2)]
    assert cached(found) == [0, 0]
    for answer in found:
        assert [token for score in answer.scores for token in score.tokens] == prompt[1:]
    assert found[0].scores == found[1].scores
    assert cached(sharing.check([(prompt, params(1))])[0]) == [48], "others do find what they computed"


def test_salts_and_resets(sharing: Sharing) -> None:
    engine, prompt = sharing.fresh(), some(60, seed=9)
    for salt in (None, "a", "b", ""):
        assert [cached(sharing.check([(prompt, params(0), salt)])[0]) for _ in range(2)] == [[0], [48]], salt
    together = [
        answer for [answer] in sharing.check([([*prompt, i], params(i), "cd"[i % 2]) for i in range(6)])
    ]
    assert cached(together) == [0, 0, 48, 48, 48, 48]
    assert engine.do(ResetPrefixCache()) and engine.scheduler.blocks.cached == 0
    for salt in (None, "a", "c"):
        assert cached(sharing.check([(prompt, params(1), salt)])[0]) == [0]
    steps = iter(range(1000))
    work: list[Work] = [([*prompt, *some(i, seed=i)], params(i, max_tokens=60)) for i in range(3)]
    sharing.check(work, lambda: next(steps) == 5 and engine.do(ResetPrefixCache()))
    assert next(steps) > 20 and engine.scheduler.blocks.cached == 0, "what ran during a reset is found"
    assert cached([answer for [answer] in sharing.check(work)])[0] == 0


def test_nothing_is_compiled_and_steps_overlap(sharing: Sharing) -> None:
    """200 requests of every sort in a cache that is too small for them."""
    engine = sharing.fresh(sharing.most_pages(191) * 3 // 2)
    compiles = engine.compiles_since_start
    work = mixed(200, vocab=96, seed=1, masks=False)
    found = run(engine, work)
    assert engine.compiles_since_start == compiles
    scheduler = engine.scheduler
    assert (
        scheduler.registry.num_preemptions > 5
        and scheduler.blocks.evictions > 100
        and scheduler.prefixes.hits > 2000
    )
    assert sharing.calls["pages copied"] > 50 and sharing.calls["update"] > 20 and sharing.calls["score"] > 10
    overlapped, steps = overlapped_steps(engine)
    assert steps > 300 and overlapped >= 0.95 * steps
    check_equal(found, run(sharing.cold, [(p, how) for p, how, *_ in work]))
