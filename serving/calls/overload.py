"""Overload errors as plain exceptions, which errors.py converts to gRPC statuses."""

from __future__ import annotations


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
