"""What a replay gives: when each request got its first and its last token, and what the engine did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """The engine at a moment of a replay."""

    seconds: float
    running: int
    waiting: int
    owned_pages: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """
    Attributes:
        first, last: float64 by row of the trace, when its first and last token came, in the trace's seconds; nan where none did.
        preemptions, cached: int64 by row, how often it was preempted, and its prompt tokens that were found in the cache.
        refused: requests that this engine can never answer.
        rejected: by reason, those that ended without all of their tokens.
        steps: that were run.
        device_seconds, host_seconds: that device and host have worked.
        begin, end: of the replay.
        samples: some moments of it, in order.
        pages: of an engine's cache.
        engines: that ran side by side.
    """

    first: np.ndarray
    last: np.ndarray
    preemptions: np.ndarray
    cached: np.ndarray
    begin: float = 0.0
    end: float = 0.0
    refused: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    pages: int = 0
    engines: int = 1

    @classmethod
    def empty(cls, requests: int, begin: float) -> Outcome:
        nan = np.full(requests, np.nan)
        zero = np.zeros(requests, np.int64)
        return cls(first=nan, last=nan.copy(), preemptions=zero, cached=zero.copy(), begin=begin)


def joined(outcomes: list[Outcome]) -> Outcome:
    """Of several engines, each of which has run some of a trace's requests. Samples are those of the first."""
    first, last = np.stack([one.first for one in outcomes]), np.stack([one.last for one in outcomes])
    return Outcome(
        first=np.fmax.reduce(first),
        last=np.fmax.reduce(last),
        preemptions=np.sum([one.preemptions for one in outcomes], axis=0),
        cached=np.sum([one.cached for one in outcomes], axis=0),
        begin=min(one.begin for one in outcomes),
        end=max(one.end for one in outcomes),
        refused=sum(one.refused for one in outcomes),
        rejected=dict(sum((Counter(one.rejected) for one in outcomes), Counter())),
        steps=sum(one.steps for one in outcomes),
        device_seconds=sum(one.device_seconds for one in outcomes),
        host_seconds=sum(one.host_seconds for one in outcomes),
        samples=outcomes[0].samples,
        pages=outcomes[0].pages,
        engines=sum(one.engines for one in outcomes),
    )
