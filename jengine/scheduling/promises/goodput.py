"""Counts requests that met their targets."""

from __future__ import annotations

from collections import deque

from jengine.scheduling.promises.promises import EPSILON
from jengine.scheduling.requests.sequence import Sequence

RECENT = 64  # number of recent requests that indicate the current load


class Goodput:
    """Counts of completed requests that had targets.

    Attributes:
        met: the first token came within ttft_ms, and the others tpot_ms apart on average.
        missed: at least one of these targets was missed.
        rejected: rejected before running, since their targets could not be met.
    """

    def __init__(self) -> None:
        self.met = self.missed = self.rejected = 0
        self._recent: deque[bool] = deque(maxlen=RECENT)  # whether each recent request was late

    @property
    def late(self) -> float:
        """Share of recent requests that were late."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    def ended(self, sequence: Sequence, now: float) -> None:
        """Records that a request with targets has received its last token."""
        met = in_time(sequence, now)
        self.met, self.missed = self.met + met, self.missed + (not met)
        self._recent.append(not met)

    def reject(self) -> None:
        self.rejected += 1
        self._recent.append(True)


def in_time(sequence: Sequence, now: float) -> bool:
    """Whether a sequence that has just received its last token met its targets."""
    first, others = sequence.first_token, len(sequence.tokens) - sequence.prompt_len - 1
    if first is None or first - sequence.arrival > sequence.ttft + EPSILON:
        return False
    return others < 1 or (now - first) / others <= sequence.tpot + EPSILON
