"""Drafts of a draft model: the scheduler plans rows for tokens that only the device will know."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jengine.scheduling.costs.draft_costs import all_of_them, most_a_second
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.drafters.choice import PRIORS, Rates
from jengine.scheduling.drafters.drafter import Draft
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.step_plan import NO_WORK
from jengine.table.program_table import DraftKey, ProgramTable, SamplerKey, TrunkKey
from jengine.table.ready_programs import ReadyPrograms, first_needed
from tests.scheduling.answers import VOCAB, alone
from tests.scheduling.strict_device import Loop


def drafting(right: float = 1.0, seed: int = 0, most: int = 4, **changes: Any) -> Loop:
    """A loop whose draft model is right with this probability."""
    options: dict[str, Any] = {
        "max_model_len": 96,
        "tile_size": 8,
        "page_size": 4,
        "num_pages": 400,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 72,
        "how_many_drafts": all_of_them,
        "speculative_config": {"method": "draft_model", "model": "small", "num_speculative_tokens": most},
        "drafts": most,
    }
    loop, draw, answers = Loop(**options | changes), random.Random(seed), dict[Sequence, list[int]]()

    def propose(sequence: Sequence) -> list[int]:
        if sequence not in answers:
            tokens = alone(sequence.request, sequence.seed, loop.max_model_len)[0]
            answers[sequence] = [token if draw.random() < right else abs(token - 1) for token in tokens]
        return answers[sequence]

    loop.device.propose = propose
    return loop


def test_a_plan_names_the_program_that_drafts() -> None:
    one = drafting()
    sequence = one.add([1, 2, 3], max_tokens=10, ignore_eos=True)
    one.step(ahead=0)
    assert one.last.draft is None, "a prompt needs no drafts"
    one.step(ahead=1)
    assert one.last.draft == DraftKey(8, 4) and one.last.guesses == 4 and one.last.trunk == TrunkKey(8, 0)
    costs = one.scheduler.predictor.costs
    alone = costs.seconds(one.last.trunk, one.last.sampler, one.last.work)
    assert one.last.seconds == alone + costs.base(DraftKey(8, 4))
    one.drain(ahead=1)
    speculation = one.scheduler.speculation
    # ten tokens: one after the prompt, five in one step, four in the last one, whose last token is no input
    assert (speculation.drafts, speculation.tokens, speculation.accepted[:5]) == (2, 7, [2, 2, 2, 1, 0])
    assert len(sequence.output_token_ids) == 10 and one.device.drafted == 2


@pytest.mark.parametrize("most", [1, 3])
def test_the_next_drafts_wait_for_the_token_in_flight(most: int) -> None:
    """Also a single draft: it follows that token."""
    one = drafting(most=most)
    one.add([1], max_tokens=20, ignore_eos=True)
    one.step(ahead=1)
    assert one.scheduler.speculation.awaited
    one.step(ahead=1)
    assert one.last.guesses == most


def test_rates_are_learned_from_verified_drafts() -> None:
    one = drafting(right=0.0)
    one.add([1], max_tokens=60, ignore_eos=True)
    before = chance(one)
    one.drain(ahead=1)
    assert before == PRIORS["model"][0] and chance(one) < 0.2 * before


def chance(one: Loop) -> float:
    watched = one.scheduler.speculation._drafter
    assert watched is not None
    return watched.rates.chances(Draft([-2], source="model"))[0]


def test_a_model_that_is_always_wrong_is_asked_ever_less_often() -> None:
    """Where drafts cost more than they give, none are made, but some are tried later."""
    one = drafting(right=0.0, how_many_drafts=most_a_second, max_model_len=900, num_pages=600)
    one.add([1], max_tokens=800, ignore_eos=True)
    drafted = list[bool]()
    while one.scheduler.has_work:
        one.step(ahead=1)
        drafted.append(one.last.draft is not None)
    assert drafted.count(True) < len(drafted) // 5
    assert any(drafted[len(drafted) // 2 :]), "never tried again"


def test_drafting_costs() -> None:
    """A draft model that takes longer than it saves is not used; a fast one is."""
    for seconds, used in ((1e-6, True), (1.0, False)):
        one = drafting(how_many_drafts=most_a_second)
        table = one.scheduler.table
        known: dict[Any, float] = {key: 1e-3 for key in table.trunks()}
        known |= {key: 1e-6 for key in table.samplers()} | {key: seconds for key in table.draft_keys()}
        one.scheduler.predictor.costs = StepCosts(table, known)
        one.add([1], max_tokens=40, ignore_eos=True)
        one.drain(ahead=1)
        assert (one.device.drafted > 0) == used


def test_unused_shares_return_to_what_was_assumed() -> None:
    rates = Rates()
    for _ in range(100):
        rates.note("model", 0, right=False)
    low = rates.chances(Draft([-2], source="model"))[0]
    for _ in range(2000):
        rates.miss("model")
    assert low < 0.1 and rates.chances(Draft([-2], source="model"))[0] == pytest.approx(0.7, abs=0.05)


def test_costs_of_a_program_that_drafts_are_learned() -> None:
    table = ProgramTable((8,), (8,), (1,), 16, drafts=3)
    trunk, sampler, draft = TrunkKey(8, 0), SamplerKey(8, "greedy"), DraftKey(8, 3)
    costs = StepCosts(table, {trunk: 0.010, sampler: 0.001})
    for _ in range(5):
        costs.observe(trunk, sampler, NO_WORK, 0.014, draft)
    assert costs.known[draft].seconds == pytest.approx(0.003, rel=0.3) and costs.base(trunk) == 0.010
    again = StepCosts.from_json(costs.to_json())
    assert again.base(draft) == costs.base(draft)
    for _ in range(400):
        costs.observe(trunk, sampler, NO_WORK, 0.028, draft)
    seconds = costs.seconds(trunk, sampler) + costs.added_seconds(draft)
    assert seconds == pytest.approx(0.028, rel=0.05)


def test_a_trunk_is_ready_with_a_program_that_drafts_for_its_rows() -> None:
    table = ProgramTable.build(max_num_seqs=32, max_num_batched_tokens=96, tile_size=32, drafts=2)
    first = first_needed(table)
    ready = ReadyPrograms(table, first)
    assert ready.drafts() and ready.draft(ready.max_rows).rows >= ready.max_rows
    without = [key for key in table.all_keys() if not isinstance(key, DraftKey) or key.rows < 32]
    assert ReadyPrograms(table, without).max_rows < 32 == ReadyPrograms(table).max_rows


@pytest.mark.parametrize("seed", range(12))
def test_among_other_requests(seed: int) -> None:
    """Samples, beams, hits, preemptions, aborts, windows, prompts on rows and few programs at first."""
    draw = random.Random(seed)
    windows = draw.choice([(None,), (None, 3)])
    one = drafting(
        draw.choice([0.0, 0.5, 0.9, 1.0]),
        seed,
        most=draw.choice([1, 3, 7]),
        max_model_len=draw.choice([24, 48, 96]),
        page_size=draw.choice([1, 2, 4]) * 4,
        num_pages=1 + 24 * len(windows) + draw.choice([0, 6, 30]),
        windows=windows,
        prefix_caching=True,
        host_pages=draw.choice([0, 20]),
        page_buckets=draw.choice([(0,), (1, 24)]),
        prompt_rows=seed % 2 == 1,
        invariant_tiles=draw.choice([0, 0, 2]),
    )
    if seed % 3 == 0:
        one.begin_with_few()
    ahead, longest = draw.randint(0, 2), one.max_model_len - 1
    while len(one.sequences) < 60:
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))]
        if one.sequences and draw.random() < 0.5:  # begins as another one
            known = draw.choice(one.sequences).tokens
            prompt = [*known[: draw.randint(0, len(known))], *prompt][:longest]
        n, ignore_eos = draw.choice([1, 1, 3]), draw.random() < 0.7
        one.add(prompt, draw.randint(0, 2), n=n, max_tokens=draw.randint(1, 40), ignore_eos=ignore_eos)
        if draw.random() < 0.1:
            sequence = draw.choice(one.sequences)
            if sequence.finish_reason is None:
                one.abort(sequence)
        if draw.random() < 0.2:
            one.get_more(draw.randint(1, 4))
        for _ in range(draw.choice([1, 2, 8])):
            one.step(ahead)
    one.drain(ahead)
    assert one.device.drafted >= one.scheduler.speculation.drafts > 10
