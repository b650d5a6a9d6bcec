"""Operations for tests of what carries them, and an engine whose process knows them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from jengine import InvalidArgument
from jengine.serving.processes.engines import WarmEngine
from jengine.spi import Operation
from tests.mocks.mock_engine import mock_engine


def engine(**options: Any) -> WarmEngine:
    return mock_engine(**options)


class Add(Operation[list[float]], frozen=True):
    """Answers its arguments, and their sum."""

    first: float
    second: float

    def run(self, engine: Any) -> list[float]:
        return [self.first, self.second, self.first + self.second]


class Fail(Operation[None], frozen=True):
    kind: str

    def run(self, engine: Any) -> None:
        raise (
            InvalidArgument("kind", self.kind, "too odd")
            if self.kind == "InvalidArgument"
            else ZeroDivisionError("by nothing")
        )


class AnswerOddly(Operation[Any], frozen=True):
    """Its answer cannot be sent: JSON cannot represent it, or it is too large."""

    size: int = 0

    def run(self, engine: Any) -> Any:
        return "x" * self.size if self.size else object()


class WaitForFile(Operation[str], frozen=True):
    """Answers when the file exists, with its text."""

    path: str
    in_thread = True

    def run(self, engine: Any) -> str:
        path = Path(self.path)
        while not path.exists():
            time.sleep(0.005)
        return path.read_text()


class Count(Operation[int], frozen=True):
    """How often this was done by an engine."""

    def run(self, engine: Any) -> int:
        engine.count = getattr(engine, "count", 0) + 1
        return engine.count  # type: ignore[no-any-return]
