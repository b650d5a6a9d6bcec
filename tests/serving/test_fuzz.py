"""Random requests generated from the protos: each gets an answer or an error, and the server continues."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from tests.serving.conftest import MakeServer

METHODS = {
    f"/jengine.v1.GenerateService/{method.name}": method
    for method in pb.DESCRIPTOR.services_by_name["GenerateService"].methods
}
REASONS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
TEXTS = [
    "", "a", "fox", "user", "system", "assistant", "tool", "mock", "1", "The quick brown fox", "\x00",
    "naïve 世界 🙂", "{", "[]", "{}", "null",
]  # fmt: skip
TEXTS += [
    '{"type": "object"}',
    "a+b*",
    "(",
    "[" * 2000,
    '{"a":' * 2000,
    "start: /a/",
    "x" * 3000,
    "%s %d {}",
    "</s>",
    "a" * 100 + "+" * 100,
]
TEXTS += [
    "temperature",
    "text_input",
    "max_tokens",
    "stop",
    "BYTES",
    "INT32",
    "FP32",
    "sampling_parameters",
    "timeout",
    "text_output",
]
REALS = [0.0, -0.0, 1.0, -1.0, 0.5, 0.01, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")]
WHOLE = [
    0,
    1,
    -1,
    2,
    5,
    16,
    100,
    300,
    500,
    1000,
    2**31 - 1,
    -(2**31),
    2**32 - 1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
]
LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.cpp_type in LIMITS:
        low, high = LIMITS[field.cpp_type]
        return min(max(rng.choice(WHOLE), low), high)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(REALS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    return rng.choice(TEXTS).encode() if field.type == FieldDescriptor.TYPE_BYTES else rng.choice(TEXTS)


def fill(message: Message, rng: random.Random, share: float) -> Message:
    """Sets about this share of a message's fields."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() > share:
            continue
        times = rng.choice([1, 1, 2, 5, 30]) if field.is_repeated else 1
        for _ in range(times):
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                key, value = field.message_type.fields
                if value.message_type is not None:
                    fill(getattr(message, field.name)[scalar(key, rng)], rng, share)
                else:
                    getattr(message, field.name)[scalar(key, rng)] = scalar(value, rng)
            elif field.message_type is not None:
                fill(
                    getattr(message, field.name).add() if field.is_repeated else getattr(message, field.name),
                    rng,
                    share,
                )
            elif field.is_repeated:
                getattr(message, field.name).append(scalar(field, rng))
            else:
                setattr(message, field.name, scalar(field, rng))
    return message


def likely(message: Message) -> Message:
    """Changes a request so that it passes more than the first check."""
    if isinstance(message, pb.GenerateRequest | pb.ChatRequest | pb.TokenizeRequest | pb.DetokenizeRequest):
        message.model = ""
    if isinstance(message, pb.GenerateRequest) and not (message.text or message.token_ids.ids):
        message.text = "The quick brown fox"
    if isinstance(message, pb.ChatRequest) and not message.messages:
        message.messages.add(role="user", content="The quick brown fox")
    return message


async def ask(
    channel: grpc.aio.Channel, rng: random.Random, seen: Counter[tuple[str, Any]], metadata: Any = None
) -> None:
    """Sends one request. `metadata`: with a key that is no administrator's."""
    name = rng.choice(sorted(METHODS))
    method = METHODS[name]
    kind: type[Message] = getattr(pb, method.input_type.name)
    request = fill(kind(), rng, rng.choice([0.05, 0.1, 0.3, 0.9]))
    if isinstance(request, pb.GenerateRequest) and rng.random() < 0.3:  # as short as can be
        request = pb.GenerateRequest(
            sampling_params=pb.SamplingParams(max_tokens=rng.randint(1, 4), n=rng.choice([1, 1, 2, 32, 64]))
        )
        request.token_ids.ids.extend(rng.randrange(500) for _ in range(rng.randint(1, 3)))
    if isinstance(request, pb.ProfileRequest) and not request.HasField("seconds"):
        request.seconds = 0.1  # the default takes 15 s
    raw = (likely(request) if rng.random() < 0.7 else request).SerializeToString()
    if rng.random() < 0.1:
        spoiled = bytearray(raw or b"\x00")
        spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
        raw = bytes(spoiled)
    answers = "stream" if method.server_streaming else "unary"
    call = getattr(channel, f"unary_{answers}")(name)(raw, timeout=60, metadata=metadata)
    try:
        if method.server_streaming:
            async for _ in call:
                if rng.random() < 0.01:
                    call.cancel()
                    return
        else:
            await call
    except grpc.aio.AioRpcError:
        pass
    except asyncio.CancelledError:
        return
    code = await call.code()
    assert code in REASONS or (metadata and code is grpc.StatusCode.PERMISSION_DENIED), (
        name,
        code,
        await call.details(),
        raw[:500],
    )
    seen[method.name, code.name] += 1


def fuzz(make_server: MakeServer, seed: int, requests: int) -> Counter[tuple[str, Any]]:
    """The results of this many requests."""
    seen: Counter[tuple[str, Any]] = Counter()
    rng = random.Random(seed)

    async def worker(channel: grpc.aio.Channel, number: int) -> None:
        own = random.Random(rng.random())
        for _ in range(number):
            await ask(channel, own, seen)

    async def main(address: str) -> None:
        # A profile may be larger than gRPC's default limit. A client that refuses an answer also makes the
        # server log an error.
        async with grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
            await asyncio.gather(*[worker(channel, requests // 10) for _ in range(10)])

    with make_server() as server:
        asyncio.run(main(server.address))
        server.wait_until_idle()
        with server.stub() as stub:
            assert stub.Generate(pb.GenerateRequest(text="still here")).usage.completion_tokens == 16
    return seen


def check(seen: Counter[tuple[str, Any]], requests: int) -> None:
    assert 0.9 * requests < sum(seen.values()) <= requests
    for method in ("Generate", "GenerateStream", "Chat"):
        assert seen[method, "OK"] and seen[method, "INVALID_ARGUMENT"], seen


def test_1000_requests_at_random(make_server: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    check(fuzz(make_server, 0, 1000), 1000)
    assert not [
        record
        for record in caplog.records
        if record.levelno >= logging.ERROR and record.name.startswith(("jengine", "grpc"))
    ]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 6))
def test_10_000_requests_at_random(make_server: MakeServer, seed: int) -> None:
    check(fuzz(make_server, seed, 2000), 2000)
