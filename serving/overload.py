"""Why a server cannot go on with a request: plain exceptions, which errors.py makes into gRPC statuses."""

from __future__ import annotations


class Busy(Exception):
    """There is too much to do. Attributes: `retry_seconds`, after which another attempt is worth it."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class SlowReader(Exception):
    """The client did not read a message in time."""
