"""The scheduler's plans, rejections and guarantees, case by case."""

from __future__ import annotations

import gc

import pytest

from jengine.base.errors import InvalidArgument, PromptTooLong
from jengine.core.request import DEVICE_STOPS, MASKED_STOPS, Request, SamplingParams
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.requests.sequence import State
from jengine.scheduling.requests.sequence_limits import SequenceLimits
from jengine.table.program_table import TrunkKey
from tests.scheduling.strict_device import Loop, alone

NO_END = {"ignore_eos": True}


def loop(**options):
    defaults = {
        "max_model_len": 64,
        "tile_size": 8,
        "page_size": 4,
        "num_pages": 65,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 36,
    }
    return Loop(**{**defaults, **options})


@pytest.mark.parametrize(
    ("prompt", "params", "field", "limit"),
    [
        ([], {}, "prompt_token_ids", "at least 1"),
        ([1] * 64, {}, "prompt_token_ids", "at most max_model_len - 1 = 63"),
        (
            [1] * 30,
            {"max_tokens": None},
            "max_tokens",
            "30 prompt tokens and up to 34 more need 16 pages of 4 tokens; the cache has 10",
        ),
        ([1] * 30, {"max_tokens": 12}, "max_tokens", "need 11 pages"),
    ],
)
def test_refuses_what_can_never_run(prompt, params, field, limit):
    small = loop(num_pages=11)
    with pytest.raises(InvalidArgument) as refusal:
        small.add(prompt, **params)
    assert refusal.value.field == field and limit in str(refusal.value)
    assert not small.scheduler.has_work


@pytest.mark.parametrize(
    ("stops", "ends", "min_tokens", "fits"),
    [(MASKED_STOPS, DEVICE_STOPS - MASKED_STOPS, 3, True),
        (MASKED_STOPS, DEVICE_STOPS - MASKED_STOPS + 1, 3, False),
     (MASKED_STOPS, DEVICE_STOPS, 0, True), (MASKED_STOPS + 1, DEVICE_STOPS, 3, True)],
)  # fmt: skip
def test_stop_tokens_are_limited_only_where_the_device_suppresses_them(
    stops: int, ends: int, min_tokens: int, fits: bool
) -> None:
    """Until min_tokens; with more stop tokens, a mask does."""
    params = SamplingParams(stop_token_ids=list(range(100, 100 + stops)), min_tokens=min_tokens)
    request = Request(request_id="0", prompt_token_ids=[1], params=params)
    assert params.masks == params.many_stops == (stops > MASKED_STOPS and min_tokens > 0)
    limits = SequenceLimits(max_model_len=64, page_size=4, pages=60)
    if fits:
        limits.validate(request, tuple(range(ends)))
    else:
        with pytest.raises(
            InvalidArgument,
            match="min_tokens=3: must be 0: the model has 17 end-of-sequence tokens; 33 with stop",
        ):
            limits.validate(request, tuple(range(ends)))


def test_a_prompt_whose_tokens_see_each_other_fits_a_step() -> None:
    limits = SequenceLimits(max_model_len=64, page_size=4, pages=60, whole=8, prefix=True)
    for tokens in (8, 9):
        request = Request(request_id="0", prompt_token_ids=[1] * tokens, params=SamplingParams())
        if tokens == 8:
            limits.validate(request, ())
        else:
            with pytest.raises(PromptTooLong, match="9 tokens; at most 8, in one step"):
                limits.validate(request, ())


def test_an_id_is_refused_while_its_request_lives():
    one = loop()
    first = one.add([1, 2], max_tokens=2)
    with pytest.raises(InvalidArgument, match="not finished"):
        one.scheduler.add(first.request, seed=1, eos_token_ids=())
    one.drain(ahead=0)
    one.scheduler.add(first.request, seed=1, eos_token_ids=())


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_longest_request_that_is_accepted_fills_the_pool_alone(ahead):
    """40 tokens and one that is never an input: 10 pages. It is never preempted, whoever waits behind it."""
    full = loop(num_pages=11)
    first = full.add([1] * 30, max_tokens=11, **NO_END)
    second = full.add([2] * 30, max_tokens=11, **NO_END)
    full.drain(ahead)
    assert full.exhausted
    assert first.num_preemptions == 0 and len(first.output_token_ids) == len(second.output_token_ids) == 11


def test_max_tokens_is_cut_to_the_models_length():
    one = loop()
    sequence = one.add([1] * 60, max_tokens=100, **NO_END)
    one.drain(ahead=1)
    assert len(sequence.output_token_ids) == 4 and sequence.finish_reason == "length"


@pytest.mark.parametrize(
    ("eos", "params", "reason", "stop_reason"),
    [
        ((), {"stop_token_ids": [7]}, "stop", 7),
        ((6, 7), {}, "stop", None),
        ((7,), {"stop_token_ids": [7]}, "stop", None),
        ((7,), {"stop_token_ids": [7], **NO_END}, "stop", 7),
        ((7,), NO_END, None, None),
    ],
)
@pytest.mark.parametrize("tokens", [[7], [[7]]])
def test_a_stop_token_is_named_and_end_of_sequence_is_not(eos, params, reason, stop_reason, tokens):
    scheduler = loop().scheduler
    request = Request(request_id="r", prompt_token_ids=[1, 2, 3], params=SamplingParams(**params))
    sequence = scheduler.add(request, seed=0, eos_token_ids=eos)
    plan = scheduler.schedule()
    assert set(plan.resets[0].stop_token_ids) == {*eos, *request.params.stop_token_ids}
    scheduler.collect(plan, tokens)
    assert sequence.output_token_ids == [7]
    assert (sequence.finish_reason, sequence.stop_reason) == (reason, stop_reason)


def test_samples_of_a_prompt_share_their_stop_tokens():
    """There may be as many as the vocabulary has tokens."""
    run = loop()
    first = run.add([1], n=3, max_tokens=9, stop_token_ids=(5, 6))
    assert first.stop_token_ids == {5, 6, *first.eos_token_ids}
    assert all(sequence.stop_token_ids is first.stop_token_ids for sequence in run.sequences)
    assert run.add([1], max_tokens=9).stop_token_ids == {*first.eos_token_ids}


def test_many_rows_make_no_work_for_the_garbage_collector():
    """A new object for each row would start a collection in every step, once there are more than 700 rows."""
    rows, begun = 1000, list[int]()
    scheduler = loop(max_num_seqs=rows, max_num_batched_tokens=9 * rows, num_pages=17 * rows).scheduler
    for i in range(rows):
        params = SamplingParams(max_tokens=40, **NO_END)
        scheduler.add(
            Request(request_id=str(i), prompt_token_ids=[i], params=params), seed=0, eos_token_ids=(0,)
        )

    def step():
        plan = scheduler.schedule()
        return len(scheduler.collect(plan, [5] * len(plan.samples)).tokens)

    while step() < rows:
        pass
    gc.collect()

    def heard(phase, info):
        begun.append(info["generation"])

    gc.callbacks.append(heard)
    try:
        assert all(step() == rows for _ in range(20))
    finally:
        gc.callbacks.remove(heard)
    assert len(begun) < 2 * 5  # a start and an end each


def test_a_late_token_is_dropped():
    one = loop()
    sequence = one.add([1, 2, 3], max_tokens=30, **NO_END)
    one.step(ahead=1)
    one.step(ahead=1)
    assert sequence.in_flight == 1 and len(sequence.output_token_ids) == 1
    one.abort(sequence)
    assert one.scheduler.blocks.owned == 0
    one.step(ahead=1)
    assert sequence.in_flight == 0 and len(sequence.output_token_ids) == 1


def test_a_stop_string_overrides_the_length_it_ends_with():
    one = loop()
    sequence = one.add([1, 2, 3], max_tokens=1, **NO_END)
    one.step(ahead=0)
    assert sequence.finish_reason == "length"
    one.stop_at_string(sequence)
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "text")


def test_no_row_beyond_max_tokens():
    one = loop()
    one.add([1, 2, 3], max_tokens=3, **NO_END)
    assert [one.step(ahead=1) for _ in range(4)] == [True, True, True, False]


def test_prompts_are_prefilled_in_chunks_beside_decode_rows():
    mixed = loop(max_num_batched_tokens=4 + 16)
    mixed.add([1] * 4, max_tokens=20, **NO_END)
    mixed.step(ahead=0)
    mixed.add([2] * 37, max_tokens=4, **NO_END)
    seen = []
    for _ in range(4):
        plan = mixed.scheduler.schedule()
        rows = [span for span in plan.spans if span.tokens is None]
        seen.append(
            (len(rows), [(span.start, span.length) for span in plan.spans[len(rows) :]], len(plan.samples))
        )
        mixed.scheduler.collect(plan, *mixed.device.run(plan))
    assert seen == [
        (1, [(0, 16)], 1),
        (1, [(16, 16)], 1),
        (1, [(32, 5)], 2),
        (2, [], 2),
    ]


def test_the_tile_bucket_is_chosen_by_cost():
    """Five tiles pending: eight places cost twice as much as four, so four run; at equal cost, all five."""
    for eight, tiles in [(2.0, 4), (1.0, 5)]:
        one = loop(max_num_batched_tokens=8 * 8 + 4)
        known = {TrunkKey(8, 1): 1.0, TrunkKey(8, 2): 1.0, TrunkKey(8, 4): 1.0, TrunkKey(8, 8): eight}
        one.scheduler.predictor.costs = StepCosts(one.scheduler.table, known)
        one.add([1] * 20)
        one.add([2] * 15)
        assert len(one.scheduler.table.place(one.scheduler.schedule().spans).tiles) == tiles


@pytest.mark.parametrize(
    ("params", "variant"),
    [
        ({"temperature": 0.0}, "greedy"),
        ({"temperature": 1.0}, "sample"),
        ({"top_k": 3}, "truncated"),
        ({"presence_penalty": 1.0}, "full"),
    ],
)
def test_the_sampler_is_the_costliest_that_a_sampled_sequence_needs(params, variant):
    """32 tokens are more than a step's tiles: while the prompt is under way, its own variant is not
    needed.
    """
    one = loop(max_num_batched_tokens=20)
    one.add([1] * 3, temperature=0.0, **NO_END)
    one.step(ahead=0)
    one.add([2] * 32, max_tokens=1, **params)
    variants = []
    for _ in range(3):
        plan = one.scheduler.schedule()
        variants.append(plan.sampler.variant)
        one.scheduler.collect(plan, *one.device.run(plan))
    assert variants == ["greedy", variant, "greedy"]


def test_pages_of_the_program_cover_the_longest_sequence():
    one = loop(page_buckets=(2, 4, 16))
    one.add([1] * 7, max_tokens=30, **NO_END)
    pages = []
    for _ in range(12):
        plan = one.scheduler.schedule()
        pages.append(plan.trunk.pages)
        one.scheduler.collect(plan, *one.device.run(plan))
    # 7 prompt tokens, then one more each step: 2 pages hold 8, 4 hold 16
    assert pages == [2] * 2 + [4] * 8 + [16] * 2


@pytest.mark.parametrize("ahead", [0, 1])
def test_fcfs_admits_in_order_and_starves_nobody(ahead):
    """A request that needs nearly the whole pool, amid an endless stream of small ones."""
    crowd = loop(num_pages=17)
    for _ in range(6):
        crowd.add([1, 2, 3], max_tokens=9, **NO_END)
    large = crowd.add([5] * 50, max_tokens=10, **NO_END)
    for _ in range(200):
        crowd.add([1, 2, 3], max_tokens=9, **NO_END)
        crowd.step(ahead)
        if large.finish_reason:
            break
    assert large.finish_reason == "length"
    first = list(dict.fromkeys(crowd.admitted))
    assert first == sorted(first)
    crowd.drain(ahead)


def test_priority_decides_who_is_admitted():
    one = loop(max_num_seqs=1, policy="priority")
    for priority in (2, 0, 1, 0, 2):
        one.add([1] * 20, priority, max_tokens=5, **NO_END)
    one.drain(ahead=1)
    assert one.admitted == [1, 3, 2, 0, 4]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("policy", "victim"), [("fcfs", 2), ("priority", 0)])
def test_the_last_under_the_policy_is_preempted_and_resumes_first(policy, victim, ahead):
    one = loop(num_pages=1 + 18, policy=policy)
    for priority in (2, 0, 1):
        one.add([1] * 8, priority, max_tokens=30, **NO_END)
    while not one.scheduler.registry.num_preemptions:
        assert one.step(ahead)
    assert [s.num_preemptions for s in one.sequences] == [int(i == victim) for i in range(3)]
    assert one.sequences[victim].state is State.WAITING
    newcomer = one.add([1], 2, max_tokens=1)
    one.drain(ahead)
    assert one.exhausted
    assert one.admitted[3:].index(victim) < one.admitted[3:].index(newcomer.seed)


def test_a_preempted_sequence_keeps_the_token_in_flight():
    """The token is read after the preemption and counts. Its KV is recomputed with the others; it is not
    sampled again.
    """
    one = loop(num_pages=1 + 16)
    for token in (1, 2):
        one.add([token] * 16, max_tokens=33, **NO_END)
    last = one.sequences[1]
    while last.state is not State.WAITING or not last.num_preemptions:
        known = len(last.output_token_ids)
        one.step(ahead=1)
    assert one.exhausted and len(last.output_token_ids) == known + 1
    first = last.scheduled
    assert first > 0
    one.drain(ahead=1)
    assert last.scheduled == first, "when it first ran, however often it was preempted"
    assert last.output_token_ids == alone(last.request, last.seed, one.max_model_len)[0]


def test_admission_leaves_a_page_for_each_running_sequence():
    one = loop(num_pages=1 + 9)
    for token, length in [(1, 15), (2, 15), (3, 4)]:
        one.add([token] * length, max_tokens=4, **NO_END)
    one.step(ahead=0)
    assert (
        one.scheduler.registry.num_running == 2
        and one.scheduler.blocks.capacity - one.scheduler.blocks.owned == 1
    )
    one.drain(ahead=0)
    assert one.scheduler.registry.num_preemptions == 1  # both running ones grow by a page, and there was one


def test_aborting_what_is_unknown_does_nothing():
    one = loop()
    assert one.scheduler.abort("nobody") is None
