"""The answers of all replicas to one operation."""

from __future__ import annotations

import threading
from collections.abc import Sequence as List
from typing import Any

from jengine.api.backend import Backend, Done


class Answers:
    """Calls `done` once, when every replica has answered: with the first one's answer, or with an error if
    any had one.

    Args:
        asked: the replicas.
    """

    def __init__(self, asked: List[Backend], done: Done) -> None:
        self._asked, self._done, self._lock = asked, done, threading.Lock()
        self._found: dict[int, tuple[Any, Exception | None]] = {}

    @property
    def waits(self) -> bool:
        """Whether an answer is missing."""
        return len(self._found) < len(self._asked)

    def came(self, backend: Backend, answer: Any, error: Exception | None) -> None:
        """A replica's answer. Only its first one counts."""
        with self._lock:
            if id(backend) in self._found:
                return
            self._found[id(backend)] = answer, error
            if self.waits:
                return
        errors = [failed for _, failed in self._found.values() if failed is not None]
        if errors:
            self._done(None, errors[0])
        else:
            self._done(self._found[id(self._asked[0])][0], None)
