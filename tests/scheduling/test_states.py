"""Recurrent states: places of snapshots, their use in hits, and diverging samples. The strict device checks
every state read."""

from __future__ import annotations

import random

import pytest

from jengine.base.errors import InvalidArgument
from jengine.core.beam_params import BeamSearchParams
from jengine.scheduling.costs.draft_costs import all_of_them
from jengine.scheduling.pages.states import SPARSE
from tests.scheduling.adversaries import knowing
from tests.scheduling.answers import VOCAB
from tests.scheduling.strict_device import Loop

TILE, PAGE = 8, 4


def loop(num_states: int = 40, **options: object) -> Loop:
    defaults = {
        "max_model_len": 400,
        "num_pages": 400,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 6 + 4 * TILE,
        "prefix_caching": True,
    }
    return Loop(tile_size=TILE, page_size=PAGE, num_states=num_states, **{**defaults, **options})  # type: ignore[arg-type]


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def cached(one: Loop, prompt: list[int], **how: object) -> int:
    """Number of a prompt's tokens that are not computed, when it runs alone."""
    sequence = one.add(prompt, max_tokens=3, **how)
    one.drain(1)
    return sequence.num_cached


@pytest.mark.parametrize(
    ("length", "again"), [(TILE - 1, 0), (TILE, 0), (TILE + 1, TILE), (30, 24), (32, 24), (33, 32)]
)
def test_a_prompt_that_comes_again_goes_on_from_the_last_border_of_a_tile(length: int, again: int) -> None:
    one, prompt = loop(), tokens(length)
    assert [cached(one, prompt), cached(one, prompt)] == [0, again]
    assert cached(one, [*prompt, *tokens(9, 1)]) == length // TILE * TILE, (
        "a prompt that is longer takes all of it"
    )


def test_long_prompts_leave_snapshots_now_and_then() -> None:
    one, prompt = loop(), tokens(301)
    cached(one, prompt)
    assert one.device.states.snapshots == 301 // (SPARSE * TILE) + 1, "one at the end besides"
    assert cached(one, prompt[:200]) == 192, "of keys and values there are more"


def test_a_snapshot_is_left_where_prompts_branch() -> None:
    one, common = loop(), tokens(100)
    cached(one, [*common, *tokens(50, 1)])
    assert cached(one, [*common, *tokens(50, 2)]) == 64, "nothing said that others would branch off after 100"
    assert cached(one, [*common, *tokens(50, 3)]) == 96
    assert cached(one, [*common, *tokens(50, 4)]) == 96


def test_what_comes_together_shares_what_the_first_leaves_in_the_same_step() -> None:
    one, prompt = loop(max_num_batched_tokens=6 + 12 * TILE), tokens(24)
    for i in range(3):
        one.add([*prompt, 1 + i], max_tokens=2)
    one.step(1)
    assert [span.start for span in one.last.spans] == [0, 24, 24]  # type: ignore[attr-defined]
    one.drain(1)


def test_samples_part_without_a_copy() -> None:
    one = loop()
    one.add(tokens(13), n=4, max_tokens=9, ignore_eos=True)
    one.drain(1)
    assert one.device.states.snapshots == 1 + 4, "the prompt's state, which four rows read and one snapshot"
    assert one.device.copies == 3, "of pages of tokens"


def test_preempted_sequences_go_on_from_a_snapshot() -> None:
    one = loop()
    sequence = one.add(tokens(43), max_tokens=50, ignore_eos=True)
    for _ in range(10):
        one.step(1)
    one.scheduler.registry.preempt(sequence)
    one.drain(1)
    assert one.device.hits == 40


@pytest.mark.parametrize("steps", [1, 8])
def test_what_was_generated_leaves_snapshots_too(steps: int) -> None:
    one, prompt = loop(num_scheduler_steps=steps), tokens(43)
    sequence = one.add(prompt, max_tokens=100, ignore_eos=True)
    while len(sequence.tokens) < 100:
        one.step(1)
    assert cached(one, [*sequence.tokens[:80], *tokens(5, 1)]) == 64, "while it runs"
    one.drain(1)
    assert cached(one, [*sequence.tokens, *tokens(5, 1)]) == SPARSE * TILE * 2 == 128
    assert (one.device.bursts > 0) is (steps > 1)


def drafting(right: float, draft_states: int, **options: object) -> Loop:
    how = {"drafters": [knowing(right, 400)], "how_many_drafts": all_of_them, "max_num_batched_tokens": 72}
    return loop(40 + draft_states, draft_states=draft_states, max_num_seqs=8, **{**how, **options})


@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
def test_drafts_leave_the_same_snapshots(right: float) -> None:
    """Where a row of a draft ends at such a place, too, if it is right."""
    one, prompt = drafting(right, 16), tokens(43)
    sequence = one.add(prompt, max_tokens=140, ignore_eos=True)
    while len(sequence.tokens) < 140:
        one.step(1)
    assert cached(one, [*sequence.tokens[:80], *tokens(5, 1)]) == 64, "while it runs"
    assert cached(one, [*sequence.tokens, *tokens(5, 1)]) == SPARSE * TILE * 2 == 128
    assert one.scheduler.speculation.drafts > 5 and len(one.scheduler.blocks.states.spare) == 16  # type: ignore[union-attr]


@pytest.mark.parametrize(("draft_states", "most"), [(16, 7), (3, 3), (0, 0)])
def test_a_draft_needs_a_state(draft_states: int, most: int) -> None:
    one = drafting(1.0, draft_states)
    sequence = one.add(tokens(5), max_tokens=60, ignore_eos=True)
    seen = set[int]()
    while one.scheduler.has_work:
        one.step(1)
        seen.add(one.last.guesses)
        if one.last.guesses:
            (span,) = one.last.spans
            assert span.states is not None and len({*span.states[1:]}) == 1 + span.guesses
    assert max(seen) == most and len(sequence.output_token_ids) == 60
    others = [one.add(tokens(5, seed), max_tokens=60, ignore_eos=True) for seed in range(4)]
    one.step(0)
    one.step(0)
    assert one.last.guesses == min(draft_states, 4) == sum(span.guesses for span in one.last.spans)
    one.drain(1)
    assert all(len(other.output_token_ids) == 60 for other in others)


def test_states_of_drafts_come_back_from_whoever_leaves() -> None:
    """Aborted, or preempted, while a step with drafts is in flight."""
    one = drafting(1.0, 16)
    states = one.scheduler.blocks.states
    assert states is not None
    first, second = (one.add(tokens(9, seed), max_tokens=90, ignore_eos=True) for seed in range(2))
    one.step(0)
    one.step(1)
    assert one.last.guesses == 6 and len(states.spare) == 10
    one.abort(first)
    one.scheduler.registry.preempt(second)
    one.check()
    assert len(states.spare) == 16
    one.drain(1)
    assert len(second.output_token_ids) == 90 and len(states.spare) == 16


def test_few_states_make_requests_wait() -> None:
    one = loop(num_states=1 + 3)
    for i in range(12):
        one.add(tokens(20, i % 4), n=1 + i % 3, max_tokens=10, ignore_eos=True)
    most = 0
    while one.scheduler.has_work:
        one.step(1)
        most = max(most, one.scheduler.registry.num_running)
    one.drain(1)
    assert most == 3


def test_windows_beside_states() -> None:
    one, prompt = loop(windows=[None, 10]), tokens(90)
    assert [cached(one, prompt), cached(one, prompt)] == [0, 88]


def test_another_salt_finds_nothing_and_a_reset_forgets() -> None:
    one, prompt = loop(), tokens(60)
    assert [cached(one, prompt, salt="a"), cached(one, prompt, salt="b"), cached(one, prompt, salt="a")] == [
        0,
        0,
        56,
    ]
    one.scheduler.blocks.reset()
    assert cached(one, prompt, salt="a") == 0


def test_beams_are_refused() -> None:
    with pytest.raises(
        InvalidArgument, match="beam_width=2: no beam search with a model that has recurrent states"
    ):
        one = loop()
        one.scheduler.limits.validate(
            one.add_beams([1, 2, 3], BeamSearchParams(beam_width=2, max_tokens=4)).request, ()
        )


def test_with_batch_invariance_no_state_of_generated_tokens_is_found() -> None:
    one, prompt = loop(invariant_tiles=1), tokens(30)
    first = one.add(prompt, max_tokens=150, ignore_eos=True)
    one.drain(1)
    assert one.device.states.snapshots == 1, "of the prompt"
    assert one.scheduler.blocks.match(first.tokens, None).tokens == 24
    assert cached(one, [*first.tokens, *tokens(3, 1)]) == 24
