"""Requests that run in the background of a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from jengine import JengineError
from jengine.serving.grpc.client import Client, ServedOutput
from tests.serving.leaks import wait_until


class Stream:
    """A request, in a thread."""

    def __init__(self, client: Client, **options: Any) -> None:
        self.outputs: list[ServedOutput] = []
        self.error: JengineError | None = None
        self.thread = threading.Thread(target=self._follow, args=(client.stream([1, 2, 3], **options),))
        self.thread.start()
        wait_until(lambda: bool(self.outputs))

    def _follow(self, outputs: Iterator[ServedOutput]) -> None:
        try:
            self.outputs.extend(outputs)
        except JengineError as error:
            self.error = error

    def end(self) -> tuple[int, object, object]:
        """The number of tokens, and the reason for the end."""
        self.thread.join(30)
        assert self.error is None and self.outputs[-1].finished
        last = self.outputs[-1].outputs[0]
        return (
            sum(len(output.outputs[0].token_ids) for output in self.outputs),
            last.finish_reason,
            last.stop_reason,
        )
