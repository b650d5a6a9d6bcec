"""What a starting engine does, and how long that may take, in words for clients and operators."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

from jengine.serving.processes.wire import Starting

PROGRAM = "program"  # the unit of work whose time is estimated


def _imports() -> Starting:
    return Starting("loading libraries", "", 0, 0)


@dataclass(frozen=True, slots=True)
class StartProgress:
    """The progress of a start.

    Attributes:
        now: what the engine does; its `done` of `total` are 0 if unknown.
        since: monotonic seconds at which this work began.
    """

    now: Starting = field(default_factory=_imports)
    since: float = field(default_factory=time.monotonic)

    def after(self, news: Starting) -> StartProgress:
        """The progress after a report."""
        if news.work == self.now.work:
            return replace(self, now=news)
        return StartProgress(news)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the programs are there, if the remaining ones take as long as those so far; None:
        unknown.
        """
        now = self.now
        if now.unit != PROGRAM or not now.done:
            return None
        return (time.monotonic() - self.since) / now.done * (now.total - now.done)

    def __str__(self) -> str:
        """Such as "compiling, 12 of 41 programs, about 20 s left"."""
        now, left = self.now, self.seconds_left
        if not now.total:
            return now.work
        if now.unit != PROGRAM:
            return f"{now.work}, {100 * now.done // now.total} %"
        time_left = (
            ", time left unknown" if left is None else f", about {math.ceil(left)} s left" if left else ""
        )
        return f"{now.work}, {now.done} of {now.total} programs{time_left}"
