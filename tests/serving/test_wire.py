"""Requests and updates are the same after transmission, in whatever pieces the bytes arrive."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine import (
    BeamSearchParams,
    EngineDead,
    InvalidArgument,
    JengineError,
    Load,
    ModelError,
    OutOfMemory,
    PoolingParams,
    ProfileOptions,
    SamplingParams,
)
from jengine.core.updates import LoraLoad, ScoredToken, StoreLoad
from jengine.engine.operations import WriteProfile
from jengine.serving.processes import wire
from jengine.serving.processes.wire import (
    MAX_FRAME,
    TEXT_FIELDS,
    Add,
    Answered,
    Do,
    End,
    Frames,
    Garbled,
    Order,
    Report,
    StepUpdates,
    TooLarge,
    WireMessage,
    add_order,
    error_of,
    failed,
    frame,
    requests_of,
)
from jengine.spi import (
    Beam,
    BeamsFound,
    Ended,
    GetTrace,
    Operation,
    Pooled,
    PromptScores,
    Request,
    ResetPrefixCache,
    SetStrategy,
    TokenLogprobs,
    TokenUpdate,
    decode_operation,
    params_of_samples,
)

WIDE = st.integers(0, 10**30)
TEXT = st.text(st.characters(), min_size=1, max_size=20)  # lone surrogates too
STRUCTURES: list[dict[str, Any]] = [
    {"regex": "a\\d+"},
    {"json": {"type": "integer", "maximum": 10**30}},
    {"choice": ["yes", "\ud800"]},
    {"grammar": 'start: "x"'},
]
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 10),
    n=st.integers(1, 64),
    top_k=st.integers(-1, 10**30),
    top_p=st.floats(0.01, 1),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.none() | WIDE.map(lambda n: n + 1000),
    min_tokens=st.integers(0, 1000),
    ignore_eos=st.booleans(),
    stop=st.lists(TEXT, max_size=2),
    stop_token_ids=st.lists(st.integers(0, 100_000), max_size=16),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 100_000), st.floats(-100, 100), max_size=5),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 100_000), min_size=1, max_size=5),
    bad_words=st.lists(TEXT, max_size=2),
    structured_outputs=st.none() | st.sampled_from(STRUCTURES),
    logprobs=st.none() | st.integers(0, 20),
)
TOPS = st.lists(st.tuples(st.integers(0, 2**31), st.floats(max_value=0)), max_size=3)
LOGPROBS = st.builds(TokenLogprobs, st.floats(-100, 0), st.integers(1, 2**40), TOPS)
ID, TOKEN = st.text(st.characters(codec="utf-8")), st.integers(0, 2**31)
REASONS = st.none() | st.sampled_from(("stop", "length", "abort", "error"))
COUNT = st.integers(0, 2**40)
SERVED = st.integers(0, 9), st.floats(0, 1e9), COUNT  # preemptions, scheduled, cached
UPDATES = st.builds(
    TokenUpdate,
    ID,
    TOKEN,
    REASONS,
    st.none() | TOKEN | ID,
    st.none() | LOGPROBS,
    *SERVED,
    version=COUNT,
)
DECISIONS = st.lists(st.tuples(ID, COUNT), max_size=2).map(tuple)
GROUPS = st.lists(ID, max_size=2).map(tuple)
SCORES = st.builds(PromptScores, ID, TOKEN, st.lists(TOKEN), st.lists(LOGPROBS, max_size=3))
FOUND = st.none() | st.lists(st.builds(ScoredToken, TOKEN, LOGPROBS), max_size=2)
BEAMS = st.lists(
    st.builds(Beam, st.lists(TOKEN), st.floats(-1e9, 0), REASONS.filter(bool), FOUND), max_size=3
)
THREE = st.tuples(COUNT, COUNT, COUNT)
HOST = {name: COUNT for name in Load._fields if name.startswith("host_")}
BATCHES = st.builds(
    StepUpdates,
    st.lists(UPDATES),
    st.lists(SCORES, max_size=2),
    st.lists(st.builds(Pooled, ID, st.binary(), *SERVED, version=COUNT), max_size=2),
    st.lists(st.builds(BeamsFound, ID, BEAMS, *SERVED, version=COUNT), max_size=2),
    st.lists(st.builds(Ended, ID, REASONS.filter(bool), st.none() | ID), max_size=2),
    st.builds(
        Load,
        *[COUNT] * 9,
        st.lists(COUNT, max_size=2).map(tuple),
        GROUPS,
        *[COUNT] * 3,
        ID,
        DECISIONS,
        *[COUNT] * 3,
        **HOST,
        resumptions=THREE,
        first_token_seconds=st.none() | st.floats(0, 1e9),
        report_faults=COUNT,
        drafts=COUNT,
        draft_tokens=COUNT,
        accepted_tokens=st.lists(COUNT, max_size=2).map(tuple),
        page_size=COUNT,
        loras=st.none() | st.builds(LoraLoad, COUNT, COUNT, GROUPS, GROUPS),
        store=st.none() | st.builds(StoreLoad, ID, *[COUNT] * 5, st.floats(0, 1e9), *[COUNT] * 4),
    ),
)


def send(messages: Sequence[WireMessage], kind: Any, cuts: list[int]) -> list[Any]:
    """Sends over a connection that cuts the bytes there."""
    data = b"".join(map(frame, messages))
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    frames: Frames[Any] = Frames(kind)
    return [message for start, end in itertools.pairwise(places) for message in frames.take(data[start:end])]


POOLINGS = st.builds(
    PoolingParams,
    pooling=st.sampled_from(("last", "mean")),
    normalize=st.booleans(),
    dimensions=st.none() | COUNT.filter(bool),
)
SEARCHES = st.builds(
    BeamSearchParams,
    beam_width=st.integers(1, 10),
    max_tokens=st.integers(1, 10**30),
    temperature=st.floats(0, 10) | WIDE,
    length_penalty=st.floats(-10, 10),
)


@given(
    st.lists(PARAMS, min_size=1, max_size=3),
    st.integers(-(10**30), 10**30),
    st.none() | ID,
    st.none() | POOLINGS,
    st.none() | SEARCHES,
    st.lists(st.integers(0, 10**6), max_size=9),
)
def test_requests(
    each: list[SamplingParams],
    priority: int,
    salt: str | None,
    pooling: PoolingParams | None,
    beams: BeamSearchParams | None,
    cuts: list[int],
) -> None:
    given = [
        [
            Request(
                request_id=f"{i}/{j}",
                prompt_token_ids=[5, i, j],
                params=params,
                sample_index=j,
                priority=priority,
                ttft_ms=None if salt is None else 20.5,
                tpot_ms=None if salt is None else 7,
                client=salt or "",
                arrival=i + 0.1,
                cache_salt=salt,
                pages_from=salt,
                pooling=pooling,
                beams=beams,
            )
        ]
        for i, params in enumerate(each)
        for j in range(2)
    ]
    got = [
        requests_of(order, None)
        for order in send([add_order(tuple(requests)) for requests in given], Order, cuts)
    ]
    plain = {name: getattr(SamplingParams(), name) for name in TEXT_FIELDS}
    for requests in given:
        for request in requests:
            request.params = dataclasses.replace(request.params, **plain)
            request.priority = min(max(priority, -(2**63)), 2**63 - 1)
    assert got == given


@given(st.lists(BATCHES, max_size=3), st.lists(st.integers(0, 10**6), max_size=9))
def test_updates(batches: list[StepUpdates], cuts: list[int]) -> None:
    got = send(batches, Report, cuts)
    assert got == batches
    assert all(type(update) is TokenUpdate for batch in got for update in batch.tokens)


OPERATIONS = (
    st.just(ResetPrefixCache())
    | st.builds(SetStrategy, ID)
    | st.builds(GetTrace, st.none() | st.floats(allow_nan=False, allow_infinity=False))
    | st.builds(WriteProfile, st.builds(ProfileOptions, rate=st.integers(1, 1000)), ID, COUNT)
)
ERRORS = (
    st.builds(InvalidArgument, ID, ID | COUNT, ID)
    | st.builds(ModelError, ID)
    | st.builds(ZeroDivisionError, ID)
)


@given(st.lists(OPERATIONS, max_size=5), st.lists(st.integers(0, 10**6), max_size=9))
def test_operations(operations: list[Operation[Any]], cuts: list[int]) -> None:
    orders = [
        Do(number, type(one).__name__, msgspec.json.encode(one)) for number, one in enumerate(operations)
    ]
    got = send(orders, Order, cuts)
    assert [order.number for order in got] == list(range(len(operations)))
    assert [decode_operation(order.operation, order.arguments) for order in got] == operations


@given(st.sampled_from(["SetStrategy", "GetTrace", "WriteProfile"]) | TEXT, st.binary() | TEXT)
def test_what_is_no_operation_is_refused(name: str, arguments: bytes | str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode_operation(name, arguments)
    assert refused.value.field in ("operation", "arguments")


@given(COUNT, st.booleans() | ERRORS, st.lists(st.integers(0, 10**6), max_size=9))
def test_answers(number: int, answer: bool | Exception, cuts: list[int]) -> None:
    """An error that its caller has not caused is a JengineError, since the engine lives on."""
    error = failed(answer) if isinstance(answer, Exception) else None
    [got] = send([Answered(number, msgspec.json.encode(answer is True), error)], Report, cuts)
    assert (got.number, ResetPrefixCache().answer_of(got.answer)) == (number, answer is True)
    if isinstance(answer, Exception):
        told = error_of(got.error, JengineError)
        assert type(told) is (type(answer) if isinstance(answer, JengineError) else JengineError) and str(
            answer
        ) in str(told)


def test_samples_share_their_prompt() -> None:
    requests = [
        Request(
            request_id=str(i), prompt_token_ids=list(range(1000)), params=SamplingParams(), sample_index=i
        )
        for i in range(64)
    ]
    one, all_of_them = len(frame(add_order((requests[0],)))), len(frame(add_order(tuple(requests))))
    assert all_of_them < 2 * one


def test_samples_share_their_parameters() -> None:
    """On either side, only the first sample has the prompt's log probabilities."""
    first, others = params_of_samples(
        SamplingParams(n=64, stop_token_ids=[7], allowed_token_ids=list(range(10_000)), prompt_logprobs=2)
    )
    requests = [
        Request(request_id=str(i), prompt_token_ids=[5], params=others if i else first, sample_index=i)
        for i in range(64)
    ]
    one, all_of_them = len(frame(add_order((requests[0],)))), len(frame(add_order(tuple(requests))))
    assert all_of_them < 1.1 * one
    assert requests_of(send([add_order(tuple(requests))], Order, [])[0], None) == requests


def test_what_the_other_side_would_not_read_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    order = add_order((Request(request_id="r", prompt_token_ids=list(range(1000)), params=SamplingParams()),))
    size = len(frame(order)) - 4
    monkeypatch.setattr(wire, "MAX_FRAME", size)
    assert isinstance(Frames(Order).take(frame(order))[0], Add)
    monkeypatch.setattr(wire, "MAX_FRAME", size - 1)
    with pytest.raises(TooLarge, match=f"a message of {size} bytes; at most {size - 1}"):
        frame(order)


@given(st.binary(min_size=4, max_size=200))
def test_what_is_no_message_is_told(data: bytes) -> None:
    """Or it waits for more, or happens to be one."""
    frames: Frames[Any] = Frames(Order)
    try:
        messages = frames.take(data)
    except Garbled as error:
        assert "message" in str(error)
    else:
        assert not messages


def test_lengths_are_bounded() -> None:
    frames: Frames[Any] = Frames(Report)
    assert frames.take(MAX_FRAME.to_bytes(4, "little")) == []
    with pytest.raises(Garbled, match=str(MAX_FRAME + 1)):
        Frames(Report).take((MAX_FRAME + 1).to_bytes(4, "little"))


def test_an_order_is_no_report() -> None:
    with pytest.raises(Garbled):
        send([End(Ended("a", "abort", None))], Report, [])
    with pytest.raises(Garbled):
        Frames(Order).take(frame(StepUpdates([], [], [], [], [], Load(0, 0, 0, 0, 0, 0))))
    assert isinstance(send([Add([1], "{}", [], 0, 0.0)], Order, [])[0], Add)


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("seed", [1, "x"], "too odd"),
        ModelError("no weights", file="a.safetensors", tensor="x"),
        OutOfMemory("no"),
    ],
)
def test_errors_of_users_are_what_they_were(error: Exception) -> None:
    got = error_of(failed(error))
    assert type(got) is type(error) and str(got) == str(error)


def test_other_errors_are_the_engines_death() -> None:
    got = error_of(failed(FloatingPointError("on fire")))
    assert type(got) is EngineDead and str(got) == "FloatingPointError: on fire"
