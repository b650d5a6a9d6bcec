"""Who used the machine's processors in a period, by the kernel's figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jengine.insight.recording.records import Machine

SHORTEST = 0.2  # seconds between two samples, for shares of them
LEAST_WORK = 0.05  # share of the period in which threads must have been able to run, for a share of that time


@dataclass(frozen=True, slots=True)
class Processors:
    """The difference of two samples.

    Attributes:
        left: predicted seconds until all programs are ready; None: not known yet.
        compiling: share of the period in which not all were.
    """

    first: Machine
    last: Machine
    left: float | None
    compiling: float

    @classmethod
    def between(cls, samples: Sequence[Machine], begun: float, ended: float) -> Processors | None:
        """From the last sample before the period to the first one after it, or what there is; None: there are
        no two that are far enough apart.
        """
        before = [s for s in samples if s.at <= begun] or [*samples[:1]]
        after = [s for s in samples if s.at >= ended] or [*samples[-1:]]
        if not before or after[0].at - before[-1].at < SHORTEST:
            return None
        first, last = before[-1], after[0]
        ready = [s.at for s in samples if s.at >= first.at and s.programs_ready == s.programs]
        until = min([*ready[:1], last.at])
        return cls(first, last, _left(samples), (until - first.at) / (last.at - first.at))

    @property
    def seconds(self) -> float:
        return self.last.at - self.first.at

    @property
    def known(self) -> bool:
        """Whether the kernel says how long threads waited."""
        return self.first.ran >= 0.0

    @property
    def queued(self) -> float:
        """Share of the time in which this process's threads could run, for which they had no processor."""
        return self._share("ran", "queued")

    @property
    def loop_queued(self) -> float:
        """Share of the time in which the thread that steps the engine could run, but had no processor."""
        return self._share("loop_ran", "loop_queued")

    @property
    def others(self) -> float:
        """Processors that other processes of usual priority used."""
        return max(self.rate("normal") - self.rate("ran"), 0.0)

    @property
    def low(self) -> float:
        """Processors that work of low priority used, such as compilations."""
        return self.rate("low")

    def rate(self, figure: str) -> float:
        """Growth of a figure, a second; 0: unknown."""
        first, last = getattr(self.first, figure), getattr(self.last, figure)
        return max(float(last - first), 0.0) / self.seconds if first >= 0 else 0.0

    def _share(self, ran: str, queued: str) -> float:
        able = self.rate(ran) + self.rate(queued)
        return self.rate(queued) / able if self.known and able >= LEAST_WORK else 0.0


def _left(samples: Sequence[Machine]) -> float | None:
    """Seconds until all programs are ready, if they go on to become so as they did."""
    first, last = samples[0], samples[-1]
    came = last.programs_ready - first.programs_ready
    missing = last.programs - last.programs_ready
    if not missing:
        return 0.0
    return missing * (last.at - first.at) / came if came > 0 else None
