"""A call, as what is common to all protocols sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import grpc

# A client's clock starts before the server's, so a call that times out may be cancelled with some time left.
DEADLINE_MARGIN = 0.1  # seconds


class Call(Protocol):
    """gRPC's ServicerContext is one; for HTTP see http/calls.py."""

    def peer(self) -> str:
        """The client's address in gRPC's form: "ipv4:127.0.0.1:12345", "ipv6:%5B::1%5D:12345"."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None where it has none."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """What came with the request; of HTTP, the headers that tracing needs."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call it when the call is over, which is when its last message has gone."""


def interruption(call: Call) -> grpc.StatusCode:
    """Why a call was cancelled: DEADLINE_EXCEEDED where its deadline has (nearly) passed, else CANCELLED by the client."""
    left = call.time_remaining()
    return grpc.StatusCode.CANCELLED if left is None or left > DEADLINE_MARGIN else grpc.StatusCode.DEADLINE_EXCEEDED
