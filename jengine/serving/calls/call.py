"""The protocol-independent interface of a call, with its images and the errors of overload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import grpc

# A client's clock starts before the server's, so a call that times out may be cancelled with some time left.
DEADLINE_MARGIN = 0.1  # seconds


class Call(Protocol):
    """Implemented by gRPC's ServicerContext; for HTTP see http/calls.py."""

    def peer(self) -> str:
        """The client's address in gRPC's form: "ipv4:127.0.0.1:12345", "ipv6:%5B::1%5D:12345"."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if there is none."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Metadata of the request; for HTTP, the headers used for tracing."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Registers a function to call when the call's last message has been sent."""


def interruption(call: Call) -> grpc.StatusCode:
    """Why a call was cancelled: DEADLINE_EXCEEDED if its deadline has (nearly) passed, otherwise
    CANCELLED.
    """
    left = call.time_remaining()
    return (
        grpc.StatusCode.CANCELLED
        if left is None or left > DEADLINE_MARGIN
        else grpc.StatusCode.DEADLINE_EXCEEDED
    )


class NamedImage(NamedTuple):
    """An image with the name of its field, where that is not its place in `messages`.

    Attributes:
        source: a URL, or the bytes of a file.
    """

    source: str | bytes
    field: str


class Busy(Exception):
    """The server is overloaded.

    Attributes:
        retry_seconds: when a retry is worthwhile.
        cause: one word for logs and metrics.
    """

    def __init__(self, message: str, retry_seconds: float, cause: str = "") -> None:
        super().__init__(message)
        self.retry_seconds, self.cause = retry_seconds, cause


class SlowReader(Exception):
    """The client did not read a message in time."""
