"""A few tokens of a prompt lie on rows instead of a tile if the step is predicted to be shorter."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jengine.scheduling.costs.draft_costs import DraftCosts, Rows, all_of_them
from jengine.scheduling.costs.predictor import ChunkEnd
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.step_plan import NO_WORK, StepPlan, Work, pairs
from jengine.table.program_table import ProgramTable, SamplerKey, TrunkKey
from tests.scheduling.adversaries import knowing
from tests.scheduling.answers import VOCAB
from tests.scheduling.strict_device import Loop


class Costs(StepCosts):
    """A step costs one second, and `row` and `tile` seconds for each row and tile of its program."""

    def __init__(self, row: float, tile: float) -> None:
        super().__init__(ProgramTable((1,), (1,), (1,), 1))
        self.row, self.tile = row, tile

    def seconds(self, trunk: TrunkKey, sampler: SamplerKey | None = None, work: Work = NO_WORK) -> float:
        return 1.0 + self.row * trunk.rows + self.tile * trunk.tiles


def loop(row: float = 0.01, tile: float = 1.0, **changes: Any) -> Loop:
    options: dict[str, Any] = {
        "max_model_len": 96,
        "tile_size": 8,
        "page_size": 4,
        "num_pages": 400,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "prompt_rows": True,
        "costs": Costs(row, tile),
    }
    return Loop(**{**options, **changes})


def shape(plan: StepPlan) -> tuple[int, int, list[tuple[int, bool]]]:
    """(rows and tiles of the trunk, lengths of the spans of prompts and whether they lie on rows)."""
    spans = plan.spans[len(plan.spans) - plan.prompts :]
    return plan.trunk.rows, plan.trunk.tiles, [(span.length, span.tokens is None) for span in spans]


def prompt(length: int) -> list[int]:
    return [i % VOCAB for i in range(length)]


def test_a_short_prompt_lies_on_rows() -> None:
    one = loop()
    sequence = one.add(prompt(5), max_tokens=4, ignore_eos=True)
    one.step(ahead=0)
    assert shape(one.last) == (8, 0, [(5, True)])
    (span,) = one.last.spans
    assert (span.start, span.known, span.following) == (0, 0, [1, 2, 3, 4])
    assert one.last.work == Work(1 + round(0.3 * (2 + 3 + 4 + 5)), 5)
    assert sequence.first_token is not None and len(sequence.output_token_ids) == 1
    one.drain(ahead=1)
    assert one.device.on_rows == 5


@pytest.mark.parametrize(
    "row, tile, expected",
    [(0.01, 1.0, (16, 0, [(5, True)])), (1.0, 0.1, (8, 1, [(5, False)]))],
    ids=["cheap rows", "dear rows"],
)
def test_costs_decide(row: float, tile: float, expected: object) -> None:
    """With six streams, five more rows need the program of 16."""
    one = loop(row, tile)
    for _ in range(6):
        one.add([7], max_tokens=60, ignore_eos=True)
    while one.scheduler.registry.waiting:
        one.step(ahead=0)
    one.add(prompt(5), max_tokens=1)
    one.step(ahead=0)
    assert shape(one.last) == expected


def test_the_rest_after_a_prefix_hit() -> None:
    one = loop(prefix_caching=True)
    one.add(prompt(40), max_tokens=1)
    one.drain(ahead=0)
    one.add([*prompt(40), 5, 6, 7], max_tokens=3, ignore_eos=True)
    one.step(ahead=0)
    assert shape(one.last) == (8, 0, [(3, True)]) and one.last.spans[0].start == 40
    one.drain(ahead=1)
    assert one.device.hits == 40


def test_a_prompt_on_tiles_ends_on_rows_of_the_same_step() -> None:
    one = loop()
    one.add(prompt(18), max_tokens=3, ignore_eos=True, n=3)
    one.step(ahead=0)
    assert shape(one.last) == (8, 2, [(2, True), (16, False)])
    assert [(sample.span, sample.offset) for sample in one.last.samples] == [(0, 1)] * 3
    assert one.last.work.attended == pairs(0, 16)
    one.drain(ahead=1)
    assert one.device.on_rows == 2


def test_the_shortest_ends_lie_on_rows() -> None:
    """Of four tiles, three end up on the 16 rows: 3 + 5 + 6 tokens. The fourth has no room there."""
    one = loop()
    for length in (7, 3, 6, 5):
        one.add([length, *prompt(length - 1)], max_tokens=2, ignore_eos=True)
    one.step(ahead=0)
    assert shape(one.last) == (16, 1, [(3, True), (6, True), (5, True), (7, False)])
    one.drain(ahead=1)


def test_a_step_without_room_for_rows() -> None:
    one = loop(max_num_seqs=8)
    for i in range(6):
        one.add([i], max_tokens=20, ignore_eos=True)
    one.step(ahead=0)
    one.add(prompt(3), max_tokens=1)
    one.step(ahead=0)
    assert shape(one.last)[1:] == (1, [(3, False)])


@pytest.mark.parametrize(
    "options, params",
    [
        ({"num_states": 20}, {}),
        ({"invariant_tiles": 2}, {}),
        ({}, {"prompt_logprobs": 1}),
    ],
)
def test_what_stays_in_tiles(options: dict[str, Any], params: dict[str, Any]) -> None:
    """Recurrent states, batch invariance, and log probabilities of the prompt."""
    one = loop(**options)
    one.add(prompt(5), max_tokens=3, **params)
    one.step(ahead=0)
    assert shape(one.last)[1] > 0 and shape(one.last)[2] == [(5, False)]
    one.drain(ahead=1)


def test_the_best_number_of_ends() -> None:
    costs = loop().scheduler.rows_or_tiles
    ends = [ChunkEnd(length, 0) for length in (1, 2, 3, 7)]
    assert costs.best(0, 4, NO_WORK, 8, ends) == (4, pytest.approx(1.0 + 16 * 0.01))
    assert costs.best(8, 4, NO_WORK, 8, ends) == (3, pytest.approx(1.0 + 16 * 0.01 + 1.0))
    assert costs.best(16, 4, NO_WORK, 8, ends)[0] == 0
    assert not costs.fits(8) and not costs.fits(0) and costs.fits(7)


@pytest.mark.parametrize("seed", range(12))
def test_among_other_requests(seed: int) -> None:
    """Windows, samples, hits, preemptions, aborts, bursts, a host tier and steps planned ahead."""
    draw = random.Random(seed)
    windows = draw.choice([(None,), (5,), (None, 3)])
    one = loop(
        row=draw.choice([0.001, 0.01, 0.05]),
        max_model_len=draw.choice([24, 48]),
        page_size=draw.choice([1, 2, 4]),
        num_pages=1 + 48 * len(windows) + draw.choice([0, 6, 30]),
        windows=windows,
        prefix_caching=True,
        host_pages=draw.choice([0, 20]),
        strategy=draw.choice(["throughput", "latency", "memory"]),
        num_scheduler_steps=draw.choice([1, 8]),
        page_buckets=draw.choice([(0,), (24, 48)]),
    )
    ahead = draw.randint(0, 2)
    while len(one.sequences) < 80:
        tokens = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))]
        if one.sequences and draw.random() < 0.6:  # begins as another one
            known = draw.choice(one.sequences).tokens
            tokens = [*known[: draw.randint(0, len(known))], *tokens][: one.max_model_len - 1]
        one.add(
            tokens,
            draw.randint(0, 2),
            n=draw.choice([1, 1, 3]),
            max_tokens=draw.randint(1, 30),
            ignore_eos=draw.random() < 0.7,
        )
        if draw.random() < 0.1 and (sequence := draw.choice(one.sequences)).finish_reason is None:
            one.abort(sequence)
        for _ in range(draw.choice([1, 2, 8])):
            one.step(ahead)
    one.drain(ahead)
    assert one.device.on_rows > 50 and one.device.several > 10


def test_drafts_take_the_rows_that_prompts_leave() -> None:
    """On rows, the end of a prompt saves a tile; a draft in its place would not pay for one."""
    one = loop(drafters=[knowing(1.0, 96, 15, 0)], how_many_drafts=all_of_them, max_num_seqs=8)
    one.add([7], max_tokens=60, ignore_eos=True)
    one.step(ahead=0)
    one.step(ahead=0)
    assert one.last.guesses == 7
    one.add(prompt(5), max_tokens=1)
    one.step(ahead=0)
    assert shape(one.last) == (8, 0, [(5, True)]) and one.last.guesses == 2


def test_prompts_do_not_make_drafts_look_cheap() -> None:
    """Rows for drafts cost the same beside prompts as without them."""
    one = loop(0.5, 10.0)
    costs = DraftCosts(one.scheduler.predictor, (None,), all_of_them)
    alone, beside = (costs.offer(Rows(8, 8, 9, 0, NO_WORK), tiles, limit=60.0) for tiles in (0, 1))
    assert alone.seconds == beside.seconds == 1.0 + 0.5 * 8
    assert alone.buckets[-1] == beside.buckets[-1] and alone.buckets[-1].seconds == 1.0 + 0.5 * 16
    assert (alone.limit, beside.limit) == (60.0, 60.0 - 10.0)
