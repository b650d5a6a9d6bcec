"""Rows that verify drafts: tokens are those of an engine without drafts, whatever the drafter proposes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jengine.scheduling.costs.draft_costs import all_of_them
from tests.scheduling.adversaries import knowing
from tests.scheduling.answers import VOCAB, alone
from tests.scheduling.strict_device import Loop


def speculating(right: float = 1.0, seed: int = 0, most: int = 15, **changes: Any) -> Loop:
    options: dict[str, Any] = {
        "max_model_len": 96,
        "tile_size": 8,
        "page_size": 4,
        "num_pages": 400,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 72,
    }
    options |= changes
    drafter = knowing(right, options["max_model_len"], most, seed)
    return Loop(**options, drafters=[drafter], how_many_drafts=all_of_them)


def test_drafts_lie_on_rows_behind_the_last_token() -> None:
    one = speculating(most=3)
    sequence = one.add([1, 2, 3], max_tokens=9, ignore_eos=True)
    one.step(ahead=0)
    first = sequence.tokens[-1]
    one.step(ahead=1)
    (span,) = one.last.spans
    drafts = alone(sequence.request, sequence.seed, 96)[0][1:4]
    assert (span.start, span.length, span.known, span.guesses) == (3, 4, -1, 3) and span.following == drafts
    assert [(sample.span, sample.offset) for sample in one.last.samples] == [(0, i) for i in range(4)]
    assert (one.last.trunk.rows, one.last.guesses) == (8, 3)
    assert one.last.work.context == 4 + round(0.3 * (5 + 6 + 7))
    assert one.scheduler.speculation.awaited, "the next rows depend on these"
    one.drain(ahead=1)
    assert sequence.output_token_ids[0] == first and len(sequence.output_token_ids) == 9
    speculation = one.scheduler.speculation
    # nine tokens: one after the prompt, then four in each of two steps
    assert (speculation.drafts, speculation.tokens, speculation.accepted[:4]) == (2, 6, [2, 2, 2, 0])


def test_wrong_drafts() -> None:
    one = speculating(right=0.0, most=3)
    sequence = one.add([1, 2, 3], max_tokens=9, ignore_eos=True)
    steps = 0
    while one.scheduler.has_work:
        one.step(ahead=1)
        steps += 1
        assert sequence.certain <= sequence.num_computed
    one.check_idle()
    speculation = one.scheduler.speculation
    assert speculation.drafts == 7 and sum(speculation.accepted) == 0, "the last token needs no draft"
    assert one.device.fewer == 7


def test_bounds_are_corrected_when_a_step_is_collected() -> None:
    one = speculating(right=0.5)
    sequence = one.add([1, 2, 3], max_tokens=60, ignore_eos=True)
    while one.scheduler.has_work:
        one.step(ahead=1)
        if sequence.finish_reason is None:
            assert len(sequence.tokens) + sequence.in_flight == sequence.num_computed + 1
            slot = one.device.slots[sequence.slot]
            assert sequence.certain <= len(slot.tokens) <= sequence.num_computed
    assert one.device.fewer > 5 and one.device.verified > 5
    one.check_idle()


def test_a_token_is_due_when_as_many_came_as_came() -> None:
    one = speculating(right=0.7)
    sequence = one.add([1, 2, 3], max_tokens=60, ignore_eos=True, targets={"ttft_ms": 1e6, "tpot_ms": 1000.0})
    one.step(ahead=0)
    first = sequence.due
    while one.step(ahead=0) and sequence.finish_reason is None:
        assert sequence.due == pytest.approx(first + len(sequence.output_token_ids) - 1)


def test_rows_limit_drafts() -> None:
    one = speculating()
    for i in range(6):
        one.add([i], max_tokens=60, ignore_eos=True)
    for _ in range(8):
        one.step(ahead=0)
        assert one.last.trunk.rows == 8
    assert one.last.guesses == 2


def test_without_a_drafter_steps_overlap() -> None:
    one = speculating()
    one.scheduler.speculation._drafter = None
    one.add([1], max_tokens=20)
    one.step(ahead=1)
    assert not one.scheduler.speculation.awaited


@pytest.mark.parametrize("most, waits", [(1, False), (2, True)])
def test_steps_overlap_while_there_are_no_drafts(most: int, waits: bool) -> None:
    """A single token that known ones suggest is the one in flight."""
    one = speculating(most=most)
    one.add([1], max_tokens=20, ignore_eos=True)
    one.step(ahead=1)
    assert one.scheduler.speculation.awaited == waits


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("windows", [(None,), (None, 3), (5,), (None, 6, 6)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_tokens_are_those_of_single_rows(
    right: float, page_size: int, windows: tuple[int | None, ...]
) -> None:
    """Pages behind a window are kept as long as the shortest possible sequence needs them."""
    one = speculating(right, page_size=page_size, windows=windows, num_pages=900)
    for seed in range(24):
        prompt, stops = [seed + 1, 2, 3][: 1 + seed % 3], [seed % 7 + 1] * (seed % 2)
        one.add(prompt, max_tokens=20 + seed, ignore_eos=seed % 3 == 0, stop_token_ids=stops)
    one.add([5], max_tokens=None, ignore_eos=True)
    one.drain(ahead=1)
    assert one.scheduler.speculation.drafts > 15


def test_batch_invariance_has_drafts() -> None:
    one = speculating(0.8, invariant_tiles=2)
    for seed in range(12):
        one.add([seed + 1, 2, 3], max_tokens=20, ignore_eos=seed % 2 == 0)
    one.drain(ahead=1)
    assert one.scheduler.speculation.drafts > 0


@pytest.mark.parametrize("known", [1, 2, 5])
def test_a_token_that_is_computed_again_has_no_drafts(known: int) -> None:
    """Under batch invariance, rows compute generated tokens again after a preemption; the last of them may
    have a step of its own.
    """
    one = speculating(invariant_tiles=2)
    sequence = one.add([1, 2, 3], max_tokens=20, ignore_eos=True)
    while len(sequence.tokens) < sequence.prompt_len + known:
        one.step(ahead=0)
    one.scheduler.registry.preempt(sequence)
    one.drain(ahead=1)
    assert len(sequence.output_token_ids) == 20
    assert one.scheduler.speculation.drafts > 0


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_among_other_requests(seed: int, states: bool, steps: int) -> None:
    """Samples, beams, hits of generated tokens, preemptions, aborts, windows, prompts on rows, bursts, and
    recurrent states.
    """
    draw = random.Random(seed)
    more = draw.choice([0, 1, 2, 20]), draw.choice([1, 3, 16])
    windows = draw.choice([(None,), (5,), (None, 3)])
    one = speculating(
        draw.choice([0.0, 0.5, 0.9, 1.0]),
        seed,
        max_model_len=draw.choice([24, 48, 96]),
        page_size=draw.choice([1, 2, 4]) * 4,
        num_pages=1 + 24 * len(windows) + draw.choice([0, 6, 30]),
        windows=windows,
        prefix_caching=True,
        host_pages=0 if states else draw.choice([0, 20]),
        num_scheduler_steps=steps,
        page_buckets=draw.choice([(0,), (1, 24)]),
        prompt_rows=seed % 2 == 1 and not states,
        policy=draw.choice(["fcfs", "fair"]),
        invariant_tiles=draw.choice([0, 0, 2]) if steps == 1 and not states else 0,
        num_states=9 + sum(more) if states else 0,
        draft_states=more[1] if states else 0,
    )
    ahead, longest = draw.randint(0, 2), one.max_model_len - 1
    while len(one.sequences) < 60:
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))]
        if one.sequences and draw.random() < 0.5:  # begins as another one
            known = draw.choice(one.sequences).tokens
            prompt = [*known[: draw.randint(0, len(known))], *prompt][:longest]
        one.add(
            prompt,
            draw.randint(0, 2),
            n=draw.choice([1, 1, 3]),
            max_tokens=draw.randint(1, 40),
            ignore_eos=draw.random() < 0.7,
        )
        if draw.random() < 0.1:
            sequence = draw.choice(one.sequences)
            if sequence.finish_reason is None:
                one.abort(sequence)
        for _ in range(draw.choice([1, 2, 8])):
            one.step(ahead)
    one.drain(ahead)
    assert one.scheduler.speculation.drafts > 10


@pytest.mark.parametrize("seed", [0, 14, 59])
def test_a_token_that_is_computed_again_gets_no_draft(seed: int) -> None:
    """After a preemption under batch invariance, also the last one: another rule gives it samples."""
    draw = random.Random(seed)
    right = draw.choice([0.5, 0.9, 1.0])
    sizes = {"max_model_len": 48, "page_size": 8, "num_pages": 25, "invariant_tiles": 2}
    one = speculating(right, seed, prefix_caching=True, **sizes)
    while len(one.sequences) < 40:
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))]
        one.add(prompt, draw.randint(0, 2), max_tokens=draw.randint(1, 40), ignore_eos=True)
        for _ in range(draw.choice([1, 2, 8])):
            one.step(1)
    one.drain(1)
    assert one.scheduler.registry.num_preemptions and one.device.repeated
