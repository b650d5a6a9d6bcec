"""Requests that are large in various ways, for benchmarks.attacks and the service's tests.

Each function returns a request for a number, smaller than the 4 MiB that a server accepts by default.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import grpc

from jengine.serving.generated.jengine.v1 import generate_pb2 as pb

AnyRequest = pb.GenerateRequest | pb.ChatRequest | pb.TokenizeRequest | pb.DetokenizeRequest
BYTES = 3_900_000
WORDS = "The quick brown fox jumps over the lazy dog. "


def _generate(**params: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="The quick brown fox", sampling_params=pb.SamplingParams(**{"max_tokens": 8, **params})
    )


@cache
def _text() -> str:
    return WORDS * (BYTES // len(WORDS))


@cache
def _repeated_ids() -> pb.GenerateRequest:
    return _generate(n=64, allowed_token_ids=[5] * BYTES)


@cache
def _empty_stops() -> pb.GenerateRequest:
    return _generate(n=64, stop=[""] * (BYTES // 2))


@cache
def _large_bias() -> pb.GenerateRequest:
    return _generate(logit_bias={i: 1.0 for i in range(BYTES // 16)})


@cache
def _prompt_of_ids() -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * BYTES), sampling_params=pb.SamplingParams(n=64))


@cache
def _messages() -> pb.ChatRequest:
    return pb.ChatRequest(messages=[pb.ChatMessage()] * (BYTES // 2))


@cache
def _ids() -> pb.DetokenizeRequest:
    return pb.DetokenizeRequest(token_ids=[100] * BYTES)


def repeated_allowed_ids(i: int) -> AnyRequest:
    """Used to be sent to the engine once per sample, in a frame that was too large for it and ended it."""
    return _repeated_ids()


def many_allowed_ids(i: int) -> AnyRequest:
    """The maximum for a request; some ids are not in any vocabulary."""
    return _generate(n=64, allowed_token_ids=range(i, i + 2**18))


def empty_stops(i: int) -> AnyRequest:
    return _empty_stops()


def many_stops(i: int) -> AnyRequest:
    """The maximum; an automaton used to be built for every sample."""
    return _generate(n=64, temperature=1.0, stop=[f"{i} {j} {j * j} never comes" for j in range(256)])


def large_logit_bias(i: int) -> AnyRequest:
    return _large_bias()


def prompt_of_many_ids(i: int) -> AnyRequest:
    return _prompt_of_ids()


def long_prompt(i: int) -> AnyRequest:
    return pb.GenerateRequest(text=f"{i} {_text()}", sampling_params=pb.SamplingParams(max_tokens=8, n=64))


def long_conversation(i: int) -> AnyRequest:
    return pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content=f"{i} {_text()}")],
        sampling_params=pb.SamplingParams(max_tokens=8),
    )


def many_messages(i: int) -> AnyRequest:
    return _messages()


def long_tokenize(i: int) -> AnyRequest:
    """Allowed, for counting the tokens of a long document."""
    return pb.TokenizeRequest(text=f"{i} {_text()}")


def long_detokenize(i: int) -> AnyRequest:
    return _ids()


LARGE: dict[str, Callable[[int], AnyRequest]] = {
    made.__name__: made
    for made in (
        repeated_allowed_ids,
        many_allowed_ids,
        empty_stops,
        many_stops,
        large_logit_bias,
        prompt_of_many_ids,
        long_prompt,
        long_conversation,
        many_messages,
        long_tokenize,
        long_detokenize,
    )
}
METHODS: dict[type[AnyRequest], tuple[str, Any]] = {
    pb.GenerateRequest: ("/jengine.v1.GenerateService/Generate", pb.GenerateResponse),
    pb.ChatRequest: ("/jengine.v1.GenerateService/Chat", pb.GenerateResponse),
    pb.TokenizeRequest: ("/jengine.v1.GenerateService/Tokenize", pb.TokenizeResponse),
    pb.DetokenizeRequest: ("/jengine.v1.GenerateService/Detokenize", pb.DetokenizeResponse),
}


def send(channel: grpc.Channel, request: AnyRequest) -> Any:
    """Returns the response. Raises grpc.RpcError."""
    method, response = METHODS[type(request)]
    call = channel.unary_unary(
        method, request_serializer=type(request).SerializeToString, response_deserializer=response.FromString
    )
    return call(request, timeout=60)
