"""Fields are counted before a message is parsed: as protobuf finds them, and never beyond the limit."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from jengine.serving.calls.errors import MAX_FIELDS, has_too_many_fields
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb

TEXTS = st.lists(st.text(max_size=3), max_size=5)


def fields(message: Message) -> int:
    """The number of fields by protobuf's reflection; packed numbers count as one."""
    count = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            count += 3 * len(value)  # an entry, its key, its value
        elif field.message_type is not None:
            items = value if field.is_repeated else [value]
            count += len(items) + sum(map(fields, items))
        else:
            count += len(value) if field.is_repeated and field.type == field.TYPE_STRING else 1
    return count


@given(
    stops=TEXTS,
    words=TEXTS,
    ids=st.lists(st.integers(0, 2**31), max_size=5),
    bias=st.dictionaries(st.integers(1, 9), st.just(1.5), max_size=3),
)
def test_as_many_as_protobuf_finds(
    stops: list[str], words: list[str], ids: list[int], bias: dict[int, float]
) -> None:
    params = pb.SamplingParams(
        stop=stops, bad_words=words, allowed_token_ids=ids, logit_bias=bias, temperature=0.5
    )
    request = pb.GenerateRequest(text="x" * 500, sampling_params=params, priority=-3)
    raw, count = request.SerializeToString(), fields(request)
    assert not has_too_many_fields(raw, request.DESCRIPTOR, count)
    assert has_too_many_fields(raw, request.DESCRIPTOR, count - 1)


@given(st.binary(max_size=300))
def test_malformed_messages_are_left_to_the_parser(raw: bytes) -> None:
    has_too_many_fields(raw, pb.ChatRequest.DESCRIPTOR, 10)


@pytest.mark.parametrize(
    "message",
    [
        pb.ChatRequest(messages=[pb.ChatMessage()] * (MAX_FIELDS + 1)),
        pb.GenerateRequest(sampling_params=pb.SamplingParams(stop=[""] * MAX_FIELDS)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_too_many(message: Message) -> None:
    assert has_too_many_fields(message.SerializeToString(), message.DESCRIPTOR)


@pytest.mark.parametrize(
    "message",
    [
        pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x" * 900)] * 4096),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(10**6))),
    ],
)
def test_large_requests_within_the_limits_pass(message: Message) -> None:
    assert not has_too_many_fields(message.SerializeToString(), message.DESCRIPTOR)
