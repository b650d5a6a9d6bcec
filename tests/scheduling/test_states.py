"""Recurrent states: places of snapshots, their use in hits, and diverging samples. The strict device checks
every state read."""

from __future__ import annotations

import random

import pytest

from jengine.base.errors import InvalidArgument
from jengine.core.beam_params import BeamSearchParams
from jengine.scheduling.pages.block_table import GroupPages
from jengine.scheduling.pages.states import SPARSE
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


def test_what_was_generated_leaves_snapshots_too() -> None:
    one, prompt = loop(), tokens(43)
    sequence = one.add(prompt, max_tokens=100, ignore_eos=True)
    while len(sequence.tokens) < 100:
        one.step(1)
    assert cached(one, [*sequence.tokens[:80], *tokens(5, 1)]) == 64, "while it runs"
    one.drain(1)
    assert cached(one, [*sequence.tokens, *tokens(5, 1)]) == SPARSE * TILE * 2 == 128


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
    one, prompt = loop(groups=[GroupPages(), GroupPages(10)]), tokens(90)
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
