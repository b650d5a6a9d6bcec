"""Beams in the scheduler: vLLM's rule, shared and copied pages, and searches that are admitted and preempted
as a unit.
"""

from __future__ import annotations

from typing import Any

import pytest

from jengine.base.errors import InvalidArgument
from jengine.core.beam_outputs import sampling_of
from jengine.core.beam_params import MAX_BEAM_WIDTH, BeamSearchParams
from jengine.core.request import MAX_LOGPROBS, Request, SamplingParams
from jengine.engine.limits import Limits
from jengine.scheduling.requests.images import Images
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.requests.sequence_limits import SequenceLimits
from tests.scheduling.answers import EOS, VOCAB
from tests.scheduling.embedding_memory import FIRST, with_images
from tests.scheduling.strict_device import Loop

PROMPT = [7, 8, 9, 10, 11]


def loop(**changes: Any) -> Loop:
    options = {
        "max_model_len": 64,
        "tile_size": 8,
        "page_size": 4,
        "num_pages": 200,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 64,
    }
    return Loop(**{**options, **changes})


def searched(one: Loop, prompt: list[int] = PROMPT, ahead: int = 1, **params: Any) -> Sequence:
    """A finished search, whose result has been checked."""
    sequence = one.add_beams(prompt, BeamSearchParams(**{"max_tokens": 20, **params}))
    one.drain(ahead)
    return sequence


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.5])
@pytest.mark.parametrize("width", [1, 2, 4, MAX_BEAM_WIDTH])
def test_beams_are_those_of_the_rule(width: int, penalty: float, ahead: int) -> None:
    ended = searched(loop(), beam_width=width, length_penalty=penalty, ahead=ahead)
    assert len(ended.found) == width
    assert (
        searched(loop(), beam_width=width, length_penalty=penalty, ignore_eos=True).finish_reason == "length"
    )


def test_an_end_of_sequence_token_ends_a_beam() -> None:
    reasons = [
        beam.finish_reason for seed in range(6) for beam in searched(loop(), [seed + 1], beam_width=4).found
    ]
    assert {*reasons} == {"stop", "length"}


def test_lengths() -> None:
    assert [len(beam.tokens) for beam in searched(loop(), beam_width=3, max_tokens=1).found] == [1, 1, 1]
    cut = searched(loop(max_model_len=16), beam_width=3, max_tokens=1000, ignore_eos=True)
    assert {len(beam.tokens) for beam in cut.found} == {16 - len(PROMPT)}


def test_a_beam_that_goes_nowhere_frees_its_pages_and_others_share_theirs() -> None:
    """Four beams hold less than four sequences do, and more than one."""

    def most_pages(one: Loop) -> int:
        most = 0
        while one.scheduler.has_work:
            one.step(0)
            most = max(most, one.scheduler.blocks.owned)
        one.step(0)
        return most

    beams, samples = loop(), loop()
    prompt = [*range(1, 9)]
    beams.add_beams(prompt, BeamSearchParams(beam_width=4, max_tokens=40, ignore_eos=True))
    samples.add(prompt, n=4, max_tokens=40, ignore_eos=True)
    assert 12 < most_pages(beams) < most_pages(samples) == 2 + 4 * 10
    assert beams.device.copies > 0


def test_only_entries_that_change_are_sent() -> None:
    one = loop(max_model_len=256, num_pages=400)
    one.add_beams([*range(1, 49)] * 3, BeamSearchParams(beam_width=4, max_tokens=60, ignore_eos=True))
    sent = []
    while one.step(0):
        if one.dispatched or one.scheduler.has_work:
            sent.append(len(one.last.table))
    assert sum(sent[2:]) < 60 * 4 * 4  # of beams that have up to 51 pages each
    one.check_idle()


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_family_is_preempted_and_comes_back_as_one(ahead: int) -> None:
    one = loop(num_pages=1 + 22, max_num_seqs=8)
    first = one.add([*range(1, 37)], max_tokens=28, ignore_eos=True)
    beams = one.add_beams(PROMPT, BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True))
    others = [one.add([9, 8, seed], max_tokens=40, ignore_eos=True) for seed in range(3)]
    running = set()
    while one.scheduler.has_work:
        one.step(ahead)
        running.add(sum(sequence.searches for sequence in one.scheduler.registry.snapshot()[0]))
    one.step(0)
    one.check_idle()
    assert running <= {0, 4} and beams.num_preemptions >= 1 and first.num_preemptions == 0
    assert all(other.finish_reason == "length" for other in others)


def test_a_family_waits_for_slots_for_all_of_its_beams() -> None:
    one = loop(max_num_seqs=5)
    running = [one.add([seed + 1], max_tokens=20 + seed, ignore_eos=True) for seed in range(3)]
    one.step(0)
    beams = one.add_beams(PROMPT, BeamSearchParams(beam_width=3, max_tokens=5))
    for _ in range(15):
        one.step(0)
    assert beams.slot == 0 and one.scheduler.registry.num_running == 3
    one.drain(0)
    assert beams.finish_reason and all(sequence.finish_reason == "length" for sequence in running)


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_frees_all_beams(steps: int) -> None:
    one = loop()
    beams = one.add_beams(PROMPT, BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True))
    other = one.add(PROMPT, max_tokens=10)
    for _ in range(steps):
        one.step(1)
    one.abort(beams)
    one.drain(1)
    assert beams.finish_reason == "abort" and other.finish_reason != "abort"


def test_rows_of_others_go_on_while_beams_wait() -> None:
    one = loop()
    one.add_beams(PROMPT, BeamSearchParams(beam_width=2, max_tokens=20, ignore_eos=True))
    other = one.add(PROMPT, max_tokens=20, ignore_eos=True)
    one.step(2)
    rows = []
    for _ in range(4):
        one.step(1)
        rows.append(len(one.last.samples))
    assert rows == [1, 3, 1, 3]
    one.drain(0)
    assert len(other.output_token_ids) == 20


def test_sampled_candidates_depend_on_the_seed_alone() -> None:
    found = [
        searched(loop(), beam_width=3, temperature=1.0, ignore_eos=True, ahead=ahead).found
        for ahead in (0, 1)
    ]
    assert found[0] == found[1] != searched(loop(), beam_width=3, ignore_eos=True).found


def request_of(params: BeamSearchParams, prompt: list[int] = PROMPT) -> Request:
    return Request(request_id="r", prompt_token_ids=prompt, params=sampling_of(params), beams=params)


def test_what_can_never_run_is_rejected() -> None:
    limits = Limits(
        sequence=SequenceLimits(max_model_len=64, page_size=4, pages=20),
        max_num_seqs=4,
        vocab_size=VOCAB,
        eos_token_ids=EOS,
    )
    with pytest.raises(InvalidArgument, match=r"beam_width.*max_num_seqs = 4"):
        limits.validate(request_of(BeamSearchParams(beam_width=5, max_tokens=1)))
    # 1 shared page, and 3 x 5 others
    limits.validate(request_of(BeamSearchParams(beam_width=3, max_tokens=20)))
    with pytest.raises(InvalidArgument, match=r"of each of 4 beams, need 21 pages"):
        limits.validate(request_of(BeamSearchParams(beam_width=4, max_tokens=20)))
    limits.validate(Request(request_id="r", prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=20)))


def test_samplers_give_as_many_candidates_as_the_widest_search_takes() -> None:
    assert 2 * MAX_BEAM_WIDTH == MAX_LOGPROBS


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("beam_width", 0, "at least 1"),
        ("beam_width", MAX_BEAM_WIDTH + 1, "at most 10.*twice as many"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", None, "whole number"),
        ("temperature", -1.0, "at least 0"),
        ("length_penalty", 11.0, "in .-10, 10."),
        ("length_penalty", float("nan"), "in .-10, 10."),
        ("ignore_eos", 1, "True or False"),
        ("include_stop_str_in_output", None, "True or False"),
    ],
)
def test_parameters_are_checked(field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{field}.*{limit}"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, field: value})


def test_beams_turn_with_the_images_of_their_prompt() -> None:
    one = loop(images=Images(8, FIRST, turns=True))
    prompt, images = with_images(PROMPT, [(1, 1, 4)])
    one.add_beams(prompt, BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True), images=images)
    one.step(0)
    assert one.last.spans[0].turns is not None
    one.step(0)
    turns = one.scheduler.registry.images._turns
    assert turns is not None and [after for _, after in turns.values()] == [one.last.spans[0].after]
    one.drain(1)
