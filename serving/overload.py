"""Why a server cannot go on with a request: plain exceptions, which errors.py makes into gRPC statuses."""

from __future__ import annotations


class Busy(Exception):
    """There is too much to do.

    Attributes:
        retry_seconds: after which another attempt is worth it.
        cause: for logs and metrics: one word of a few.
    """

    def __init__(self, message: str, retry_seconds: float, cause: str = "") -> None:
        super().__init__(message)
        self.retry_seconds, self.cause = retry_seconds, cause


class SlowReader(Exception):
    """The client did not read a message in time."""
