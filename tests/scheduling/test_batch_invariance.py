"""Batch-invariant steps: their contents, the chunks of prompts, prefix cache hits, and how a preempted
sequence resumes.

Every plan runs on the strict device, which fails where a token's program or place does not follow from its
request alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.scheduling.forecasts.expectations import Hypothetical, expect
from jengine.scheduling.requests.batching import BatchInvariant
from jengine.scheduling.requests.sequence import State
from jengine.scheduling.step_plan import Work
from jengine.table.program_table import ProgramTable, SamplerKey, ScoreKey, TrunkKey
from jengine.table.ready_programs import ReadyPrograms, by_use, first_needed
from tests.scheduling.strict_device import Loop

NO_END = {"ignore_eos": True}
PROMPT = list(range(1, 31))
TEXT: Any = SimpleNamespace(whole=())
TABLE = ProgramTable.build_batch_invariant(max_num_seqs=32, tiles=2, tile_size=8)


def loop(**options):
    defaults = {
        "max_model_len": 64,
        "tile_size": 8,
        "page_size": 4,
        "num_pages": 200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
    }
    return Loop(**{"prefix_caching": True, "invariant_tiles": 1, **defaults, **options})


def computed(loop: Loop, ahead: int = 1) -> int:
    """Number of prompt tokens computed in tiles until all requests have ended."""
    before = loop.device.prefilled
    loop.drain(ahead)
    return loop.device.prefilled - before


def kinds(loop: Loop) -> Iterator[str]:
    """For each step, whether it contains rows or tiles."""
    while loop.step(ahead=1):
        yield "tiles" if loop.dispatched[-1][0].trunk.tiles else "rows"
    loop.drain(ahead=1)


def test_the_table_has_one_program_of_each_kind():
    assert TABLE.trunks() == [TrunkKey(32, 0), TrunkKey(0, 2)]
    assert TABLE.samplers() == [SamplerKey(32, "full")] and TABLE.scores() == [ScoreKey(2)]
    assert by_use(TABLE) == first_needed(TABLE) and {*by_use(TABLE)} == {
        *TABLE.trunks(),
        *TABLE.samplers(),
        *TABLE.scores(),
    }
    assert ProgramTable.build_batch_invariant(max_num_seqs=1, tiles=1, tile_size=8).max_rows == 8, (
        "no slow path for a single row"
    )


@given(
    rows=st.integers(0, 32),
    samples=st.integers(0, 32),
    variant=st.sampled_from(["greedy", "sample", "truncated", "full"]),
)
def test_every_step_takes_the_same_programs(rows, samples, variant):
    ready = ReadyPrograms(TABLE)
    assert (ready.max_rows, ready.max_tiles, ready.tile_buckets) == (32, 2, (2,))
    for trunk, key in [
        (ready.trunk(rows, 0, 0, samples), TrunkKey(32, 0)),
        (ready.trunk(0, 1 + rows % 2, 0, samples), TrunkKey(0, 2)),
    ]:
        assert trunk == key
        assert ready.sampler(trunk, variant) == TABLE.sampler(trunk, variant) == SamplerKey(32, "full")


@given(tile=st.integers(1, 64), start=st.integers(0, 9), length=st.integers(1, 300), room=st.integers(1, 300))
def test_a_chunk_ends_at_a_multiple_of_the_tile_or_with_its_prompt(tile, start, length, room):
    start *= tile
    last = start + length
    end = BatchInvariant(tile, 512).end(TEXT, start, min(start + room, last), last)
    assert end == last or end % tile == 0
    assert end == last if room >= length else end == start + room // tile * tile


@given(tile=st.integers(1, 64), page=st.integers(1, 64))
def test_hits_are_whole_tiles_and_whole_pages(tile, page):
    grid = BatchInvariant(tile, 512).hit_grid(page)
    assert grid % tile == grid % page == 0 and grid <= math.prod((tile, page))


def test_prompts_come_first_and_rows_have_their_turn():
    """Three long prompts and a stream: a step with rows follows every 32 prompt tokens."""
    one = loop()
    one.add([7], max_tokens=40, **NO_END)
    assert [next(kinds(one)) for _ in range(3)] == ["tiles", "rows", "rows"]
    for first in (2, 3, 4):
        one.add([first, *PROMPT, *PROMPT], max_tokens=2, **NO_END)
    taken = [kind for kind, _ in zip(kinds(one), range(30), strict=False)]
    assert taken[:30] == (["tiles"] * 4 + ["rows"]) * 6, "24 tiles of three prompts"


def test_what_is_expected_counts_prompts_and_rows_as_steps_of_their_own():
    one = loop()
    one.add(PROMPT, max_tokens=20, **NO_END)
    one.step(ahead=0)
    (alone,) = expect(loop().scheduler, [Hypothetical(len(PROMPT), 20)])
    (beside,) = expect(one.scheduler, [Hypothetical(len(PROMPT), 20)])
    tiles, rows = (one.scheduler.predictor.seconds(*size, Work(), 1) for size in ((0, 1), (1, 0)))
    assert one.scheduler.predictor.seconds(1, 1, Work(), 1) == pytest.approx(tiles + rows)
    assert 4 * tiles <= alone.first_token < beside.first_token < beside.last_token


def test_a_tile_that_exceeds_the_budget_alone_still_runs():
    one = loop(max_num_batched_tokens=8 + 8, invariant_tiles=2, tile_size=8)
    one.add(PROMPT, max_tokens=3, **NO_END)
    assert list(kinds(one)) == ["tiles", "tiles", "rows", "rows"]


def test_hits_end_at_tiles_that_pages_do_not_divide():
    one = loop(page_size=4, tile_size=6)
    one.add(PROMPT, max_tokens=1)
    assert computed(one) == 30
    for prompt, new in [(PROMPT, 6), (PROMPT[:25], 1), (PROMPT[:24], 12), ([*PROMPT[:20], *PROMPT], 38)]:
        one.add(prompt, max_tokens=1)
        assert computed(one) == new, "hits are multiples of 12"


def test_an_answer_within_a_prompt_is_computed_again():
    """Rows had computed it. The prompt before it is found."""
    one = loop()
    first = one.add(PROMPT, max_tokens=20, **NO_END)
    computed(one)
    one.add([*first.tokens, 7, 7, 7], max_tokens=1)
    assert computed(one) == 53 - 24


def test_a_hit_that_a_window_shortens_ends_at_a_tile():
    one = loop(windows=[None, 10], tile_size=8, num_pages=1 + 30)
    one.add(PROMPT, max_tokens=1)
    assert computed(one) == 30
    for prompt, new in [(PROMPT, 30 - 24), (PROMPT[:24], 24 - 16)]:
        one.add(prompt, max_tokens=1)
        assert computed(one) == new


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_resumed_sequence_repeats_its_own_tokens_in_rows(ahead, prefix_caching):
    one = loop(num_pages=1 + 18, prefix_caching=prefix_caching)
    one.add([1] * 21, max_tokens=30, **NO_END)
    last = one.add([2] * 21, max_tokens=30, **NO_END)
    while not last.num_preemptions:
        one.step(ahead)
    generated = len(last.tokens) - 21
    before = one.device.prefilled
    one.drain(ahead)
    assert one.exhausted and generated > 3
    assert one.device.repeated >= generated, "the last of them gives the next token"
    assert one.device.prefilled - before == 21 - 16 * prefix_caching, "its prompt alone is computed in tiles"


def test_sequences_that_exchange_their_slots_keep_their_answers():
    """Between the steps of rows before and after are steps of tiles alone."""
    one = loop(num_pages=1 + 40)
    both = [one.add([i] * 21, max_tokens=30, **NO_END) for i in (1, 2)]
    while len(both[1].tokens) < 30:
        one.step(ahead=0)
    slots = [sequence.slot for sequence in both]
    one.scheduler.preempt_all()
    while both[1].state is not State.DECODING:
        one.step(ahead=0)
    assert [sequence.slot for sequence in both] == slots[::-1]
    one.drain(ahead=0)
    assert [len(sequence.tokens) for sequence in both] == [51, 51]


def test_what_was_generated_is_not_taken_from_prompts_that_hold_it():
    """A prompt finds only the pages computed in tiles (16 tokens), although a sequence with all of its tokens
    waits to resume.
    """
    one = loop(num_pages=1 + 40)
    one.add([1] * 21, max_tokens=30, **NO_END)
    last = one.add([2] * 21, max_tokens=30, **NO_END)
    while len(last.tokens) < 40:
        one.step(ahead=0)
    one.scheduler.registry.preempt(last)
    other = one.add([*last.tokens, 5], max_tokens=1, priority=-1)
    one.drain(ahead=1)
    assert other.num_cached == 16 and one.device.repeated >= 19


def test_samples_of_one_prompt_fork_after_its_last_tile():
    one = loop()
    one.add(PROMPT, n=4, max_tokens=12, temperature=1.0, **NO_END)
    assert computed(one) == 30 and one.device.copies == 3
    assert len({tuple(tokens) for tokens in one.outputs.values()}) == 4


def test_without_it_a_resumed_sequence_is_prefilled_whole():
    one = loop(num_pages=1 + 18, invariant_tiles=0, prefix_caching=False)
    one.add([1] * 21, max_tokens=30, **NO_END)
    last = one.add([2] * 21, max_tokens=30, **NO_END)
    computed(one)
    assert last.num_preemptions and one.device.repeated == 0 and one.device.prefilled > 42 + 21
