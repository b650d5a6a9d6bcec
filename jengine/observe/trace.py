"""A record of what the loop did and when: cheap enough to be always on."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class TraceEvent(NamedTuple):
    kind: Literal["dispatch", "read"]
    step: int
    seconds: float  # time.perf_counter()
    detail: str  # the step's programs


@dataclass(slots=True)
class StepTrace:
    """The last events of the loop, oldest first."""

    events: deque[TraceEvent] = field(default_factory=lambda: deque(maxlen=100_000))

    def add(self, kind: Literal["dispatch", "read"], step: int, detail: str = "") -> None:
        self.events.append(TraceEvent(kind, step, time.perf_counter(), detail))

    def overlapped(self) -> tuple[int, int]:
        """(steps whose successor was dispatched before they were read, steps that had a successor)."""
        at = {(e.kind, e.step): i for i, e in enumerate(self.events)}
        pairs = [(at["read", s], at["dispatch", s + 1]) for kind, s in at if kind == "read" and ("dispatch", s + 1) in at]
        return sum(dispatch < read for read, dispatch in pairs), len(pairs)
