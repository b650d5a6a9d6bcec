"""Rows of several tokens that may yield fewer: the scheduler plans with upper bounds and corrects them in
`collect`.

No rule of the scheduler plans such rows yet; the one here stands for those that will.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from jengine.scheduling.pages.block_table import GroupPages
from jengine.scheduling.rules.rule import Rule
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.step.plan_builder import PlanBuilder
from tests.scheduling.answers import VOCAB
from tests.scheduling.strict_device import Loop


class Guesses(Rule):
    """Gives rows up to four tokens, if there are pages."""

    def __init__(self, scheduler: Scheduler, draw: random.Random) -> None:
        self._scheduler, self._draw = scheduler, draw

    def lengthen(self, plan: PlanBuilder) -> None:
        blocks = self._scheduler.blocks
        for span, sequence in zip(plan.spans, plan.rows, strict=False):
            length = min(self._draw.randint(1, 4), sequence.last_position - sequence.num_computed)
            end = span.start + length
            new = blocks.pages_of(end) - blocks.pages_of(span.start + 1)
            if (
                plan.steps == 1
                and length > 1
                and not sequence.searches
                and blocks.available(blocks.new_pages(new))
            ):
                plan.enter(span.slot, blocks.grow(span.seq, end))
                span.length, span.guesses = length, length - 1
                plan.lengthened, plan.longest = True, max(plan.longest, end)


def guessing(seed: int = 0, **changes: Any) -> Loop:
    options = {
        "max_model_len": 96,
        "tile_size": 8,
        "page_size": 4,
        "num_pages": 400,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }
    loop = Loop(**{**options, **changes})
    loop.scheduler.rules += (Guesses(loop.scheduler, random.Random(seed)),)
    loop.device.guesses = random.Random(seed)
    return loop


def test_bounds_are_corrected_when_a_step_is_collected() -> None:
    loop = guessing()
    sequence = loop.add([1, 2, 3], max_tokens=60, ignore_eos=True)
    planned = 0
    while loop.scheduler.has_work:
        ran = loop.step(ahead=1)
        known = len(sequence.tokens)
        assert known + sequence.in_flight == sequence.num_computed + 1
        if sequence.finish_reason is None:
            slot = loop.device.slots[sequence.slot]
            assert (
                sequence.certain <= len(slot.tokens) <= sequence.num_computed
                and sequence.certain >= known - 1
            )
            planned += ran * sum(span.length for span in loop.last.spans if span.tokens is None)
    assert loop.device.fewer > 5 and planned > 60
    loop.check_idle()


def test_a_token_is_due_when_as_many_came_as_came() -> None:
    loop = guessing()
    sequence = loop.add(
        [1, 2, 3], max_tokens=60, ignore_eos=True, targets={"ttft_ms": 1e6, "tpot_ms": 1000.0}
    )
    loop.step(ahead=0)
    first = sequence.due
    while loop.step(ahead=0) and sequence.finish_reason is None:
        assert sequence.due == pytest.approx(first + len(sequence.output_token_ids) - 1)


@pytest.mark.parametrize("windows", [(None,), (None, 3), (5,), (None, 6, 6)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_tokens_are_those_of_single_rows(ahead: int, page_size: int, windows: tuple[int | None, ...]) -> None:
    """Pages behind a window are kept as long as the shortest possible sequence needs them."""
    loop = guessing(page_size=page_size, groups=[GroupPages(window) for window in windows], num_pages=900)
    for seed in range(24):
        prompt, stops = [seed + 1, 2, 3][: 1 + seed % 3], [seed % 7 + 1] * (seed % 2)
        loop.add(prompt, max_tokens=20 + seed, ignore_eos=seed % 3 == 0, stop_token_ids=stops)
    loop.add([5], max_tokens=None, ignore_eos=True)
    loop.drain(ahead)
    assert loop.device.fewer > 50


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("seed", range(12))
def test_among_other_requests(seed: int, steps: int) -> None:
    """Samples, hits of generated tokens, preemptions, aborts, windows and bursts."""
    draw = random.Random(seed)
    windows = draw.choice([(None,), (5,), (None, 3)])
    most = 24 * len(windows)
    loop = guessing(
        seed,
        max_model_len=draw.choice([24, 48, 96]),
        page_size=draw.choice([1, 2, 4]) * 4,
        num_pages=1 + most + draw.choice([0, 6, 30]),
        groups=[GroupPages(window) for window in windows],
        prefix_caching=True,
        num_scheduler_steps=steps,
        page_buckets=draw.choice([(0,), (1, 24)]),
        prompt_rows=seed % 2 == 1,
    )
    ahead, longest = draw.randint(0, 2), loop.max_model_len - 1
    while len(loop.sequences) < 60:
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))]
        if loop.sequences and draw.random() < 0.5:  # begins as another one
            known = draw.choice(loop.sequences).tokens
            prompt = [*known[: draw.randint(0, len(known))], *prompt][:longest]
        loop.add(
            prompt,
            draw.randint(0, 2),
            n=draw.choice([1, 1, 3]),
            max_tokens=draw.randint(1, 40),
            ignore_eos=draw.random() < 0.7,
        )
        if draw.random() < 0.1:
            sequence = draw.choice(loop.sequences)
            if sequence.finish_reason is None:
                loop.abort(sequence)
        for _ in range(draw.choice([1, 2, 8])):
            loop.step(ahead)
    loop.drain(ahead)
    assert loop.device.fewer > 10
