"""A client's calls: stubs of services, a server's errors as exceptions, and which of them are retried."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status

from jengine import InvalidArgument, JengineError
from jengine.serving.calls.errors import DETAILS_KEY
from jengine.serving.generated.jengine.v1 import generate_pb2

FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 0.2, 2.0, 5.0  # seconds, if the server does not say
POLL_SECONDS = 1.0  # between two looks at a server that starts


class ServerError(JengineError):
    """The server answered with an error, or could not be reached.

    Attributes:
        code: the gRPC status.
        retry_seconds: when to retry, if the server said so.
    """

    def __init__(self, code: grpc.StatusCode, message: str, retry_seconds: float | None = None) -> None:
        self.code, self.message, self.retry_seconds = code, message, retry_seconds
        super().__init__(f"{message} ({code.name})")


def exception_of(error: grpc.RpcError, request: Message) -> JengineError:
    """InvalidArgument if the server named a field of the request, otherwise ServerError."""
    for violation in _details(error, BadRequest()).field_violations:
        field = violation.field.removeprefix("sampling_params.")
        _, _, limit = violation.description.partition(": ")
        return InvalidArgument(field, _value_at(request, violation.field), limit or violation.description)
    details = error.details() or "no details"
    if error.code() is grpc.StatusCode.UNAVAILABLE and "Socket closed" in details:  # as one with TLS does
        details += "; if the server has TLS, connect with tls (--tls)"
    return ServerError(error.code(), details, retry_seconds(error))


def retry_seconds(error: grpc.RpcError) -> float | None:
    """The retry delay requested by the server."""
    info = _details(error, RetryInfo())
    return info.retry_delay.ToNanoseconds() / 1e9 if info.HasField("retry_delay") else None


def _details[D: Message](error: grpc.RpcError, kind: D) -> D:
    """The status's detail of this type; empty if there is none."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                status = Status.FromString(value)
            except DecodeError:  # not from this server
                continue
            for detail in status.details:
                if detail.Unpack(kind):
                    return kind
    return kind


def _value_at(request: Message, path: str) -> object:
    """The value sent in this field; None if the path is not a field of the request."""
    value: object = request
    for name in path.split("."):
        if isinstance(value, Message) and name in value.DESCRIPTOR.oneofs_by_name:
            name = value.WhichOneof(name) or ""
        value = getattr(value, name, None)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often and how long a client retries a request.

    Args:
        attempts: the most attempts, the first included.
        seconds: no attempt begins later than this after the first.
    """

    attempts: int = 6
    seconds: float = 60.0


class Attempts:
    """The attempts of one request."""

    def __init__(self, retries: Retries) -> None:
        self._left, self._until, self._pause = (
            retries.attempts - 1,
            time.monotonic() + retries.seconds,
            FIRST_PAUSE,
        )

    def pause(self, error: grpc.RpcError) -> float | None:
        """Seconds to wait before the next attempt; None if the error is final.

        A busy server says when to retry. If it reports exhaustion without a delay (a message is too large),
        retrying would not help. An unreachable server is retried after growing pauses. Up to a quarter is
        added to each pause, so that clients do not all retry at the same time.
        """
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
            return None
        delay = retry_seconds(error)
        if delay is None:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return None
            delay, self._pause = self._pause, min(self._pause * PAUSE_GROWTH, LONGEST_PAUSE)
        pause = delay * random.uniform(1.0, 1.25)
        if self._left == 0 or time.monotonic() + pause > self._until:
            return None
        self._left -= 1
        return pause


class StartWait:
    """The attempts to reach a server that starts. While it says so, they are not limited in number, only by
    `seconds`.
    """

    def __init__(self, retries: Retries, seconds: float, progress: Callable[[str], None]) -> None:
        self._attempts, self._until, self._progress = Attempts(retries), time.monotonic() + seconds, progress

    def pause(self, error: grpc.RpcError) -> float | None:
        """As Attempts.pause. Passes what the server says to `progress`."""
        left, delay = self._until - time.monotonic(), retry_seconds(error)
        if error.code() is not grpc.StatusCode.UNAVAILABLE or delay is None:
            pause = self._attempts.pause(error)
        else:
            self._progress(error.details() or "")
            pause = min(delay, POLL_SECONDS)
        return None if pause is None or left <= 0.0 else min(pause, left)


class Stub:
    """Has a function for each method of a service, as the classes that protoc generates.

    Args:
        channel: of grpc or grpc.aio.
    """

    SERVICE: ServiceDescriptor

    def __init__(self, channel: Any) -> None:
        for method in self.SERVICE.methods:
            kind = "_".join(
                "stream" if streams else "unary"
                for streams in (method.client_streaming, method.server_streaming)
            )
            call = getattr(channel, kind)(
                f"/{self.SERVICE.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.SERVICE.full_name} has no method {name}")


class GenerateServiceStub(Stub):
    SERVICE = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"]
