"""The result of a replay: when each request got its first and last tokens, and totals of the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class EngineSample(NamedTuple):
    """The engine at one moment of a replay."""

    seconds: float
    running: int
    waiting: int
    owned_pages: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Result of a replay.

    Attributes:
        first, last: float64 by row of the trace: times of the first and last token, in the trace's seconds;
            nan if none came.
        preemptions, cached: int64 by row: number of preemptions, and of prompt tokens found in the cache.
        refused: number of requests that this engine can never serve.
        rejected: by reason, number of requests that ended without all of their tokens.
        steps: number of steps.
        device_seconds, host_seconds: seconds for which device and host worked.
        begin, end: start and end of the replay.
        samples: some moments of it, in order.
        pages: number of pages in an engine's cache.
        engines: number of engines that ran in parallel.
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
    samples: list[EngineSample] = field(default_factory=list)
    pages: int = 0
    engines: int = 1

    @classmethod
    def empty(cls, requests: int, begin: float) -> Outcome:
        nan = np.full(requests, np.nan)
        zero = np.zeros(requests, np.int64)
        return cls(first=nan, last=nan.copy(), preemptions=zero, cached=zero.copy(), begin=begin)


def joined(outcomes: list[Outcome]) -> Outcome:
    """Combines the outcomes of several engines, each of which ran some requests of a trace. Samples are the
    first engine's."""
    first, last = np.stack([part.first for part in outcomes]), np.stack([part.last for part in outcomes])
    return Outcome(
        first=np.fmax.reduce(first),
        last=np.fmax.reduce(last),
        preemptions=np.sum([part.preemptions for part in outcomes], axis=0),
        cached=np.sum([part.cached for part in outcomes], axis=0),
        begin=min(part.begin for part in outcomes),
        end=max(part.end for part in outcomes),
        refused=sum(part.refused for part in outcomes),
        rejected=dict(sum((Counter(part.rejected) for part in outcomes), Counter())),
        steps=sum(part.steps for part in outcomes),
        device_seconds=sum(part.device_seconds for part in outcomes),
        host_seconds=sum(part.host_seconds for part in outcomes),
        samples=outcomes[0].samples,
        pages=outcomes[0].pages,
        engines=sum(part.engines for part in outcomes),
    )
