"""What a layout serves: its time per token, first token and throughput for given traffic, and the most
sequences within targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from jengine.base.errors import InvalidArgument
from jengine.capacity.planning.roofline import CAUSES, Batch, Cause, Causes, Roofline, most_arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests of equal lengths, and targets.

    Attributes:
        prompt, output: tokens of each.
        ttft_ms, tpot_ms: milliseconds to the first token, and for each further one; None: no target.
    """

    prompt: int
    output: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            if getattr(self, name) < 1:
                raise InvalidArgument("traffic", getattr(self, name), f"the {name} needs at least 1 token")
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise InvalidArgument(f"target_{name}", value, "must be a number of milliseconds above 0")

    @property
    def context(self) -> float:
        """Average tokens of a decoding sequence."""
        return self.prompt + self.output / 2

    @property
    def tokens(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An engine that serves so many sequences at a time.

    Attributes:
        sequences: running at a time.
        ttft, tpot: seconds to the first token, without a queue, and for each further one.
        per_device: output tokens a second of one device.
        causes: seconds of a step, by what it waits for.
    """

    sequences: int
    ttft: float
    tpot: float
    per_device: float
    causes: Causes

    @property
    def bound(self) -> Cause:
        """What a step waits for most."""
        return max(self.causes, key=lambda cause: self.causes[cause])

    def meets(self, traffic: Traffic) -> bool:
        targets = ((self.ttft, traffic.ttft_ms), (self.tpot, traffic.tpot_ms))
        return all(limit is None or 1e3 * seconds <= limit for seconds, limit in targets)


@dataclass(frozen=True)
class Serving:
    """An engine under steady load: whenever a sequence ends, another begins. Each step decodes a token of
    every sequence, and some steps also compute prompts, in pieces as large as a step allows.

    With stages, a piece is in one cohort, and makes each stage in turn slower, so the others wait for it.
    Pieces arrive at random. Data ranks are taken to have equally many tokens.

    Attributes:
        fits: sequences of this traffic that the cache holds.
        budget: the most tokens of prompts in a step, on all data ranks together.
    """

    roofline: Roofline
    traffic: Traffic
    fits: int
    budget: int

    def at(self, sequences: int) -> Point:
        traffic = self.traffic
        tokens = sequences * traffic.prompt / traffic.output  # of prompts, for each step
        piece = self._piece
        # for each step: pieces in different cohorts delay the others only once
        busiest = most_arrived(tokens / piece, self.roofline.layout.stages)
        share = min(1.0, busiest)
        plain = self._pass(sequences)
        filled = self._pass(sequences, tokens / share, piece * max(1.0, busiest))
        causes: Causes = {cause: plain[cause] * (1 - share) + filled[cause] * share for cause in CAUSES}
        tpot = sum(causes.values())
        return Point(
            sequences=sequences,
            ttft=self._first_token(sequences, tpot),
            tpot=tpot,
            per_device=sequences / tpot / self.roofline.layout.devices,
            causes=causes,
        )

    @cached_property
    def best(self) -> Point | None:
        """With the most sequences that fit and meet the targets; None: not even one does."""
        if not self.fits:
            return None
        sequences = _last(lambda count: self.at(count).meets(self.traffic), self.fits)
        return self.at(sequences) if sequences else None

    @cached_property
    def alone(self) -> Point:
        """With one sequence."""
        return self.at(1)

    @property
    def prefill(self) -> float:
        """Prompt tokens a second of an engine that only computes prompts."""
        tokens = self.budget * self.roofline.layout.stages
        return tokens / self.roofline.seconds(Batch(0, 0, tokens, self.traffic.prompt))

    def decode(self, sequences: int) -> float:
        """Seconds of a step that only decodes."""
        return self.roofline.seconds(Batch(sequences, self.traffic.context))

    def _pass(self, rows: float, tokens: float = 0.0, fullest: float = 0.0) -> Causes:
        """Seconds of a step with so many tokens of prompts, all cohorts waiting for the fullest one, which
        has so many of them.
        """
        traffic, stages = self.traffic, self.roofline.layout.stages
        batch = Batch(rows, traffic.context, tokens, traffic.prompt)
        causes = self.roofline.step(batch)
        if fullest * stages > tokens:
            longest = self.roofline.seconds(batch._replace(tokens=fullest * stages))
            causes["bubble"] += max(0.0, longest - sum(causes.values()))
        return causes

    @property
    def _piece(self) -> float:
        """The most tokens of a prompt that a step of one data rank has room for."""
        return min(self.traffic.prompt, max(1.0, self.budget / self.roofline.layout.data))

    def _first_token(self, sequences: int, tpot: float) -> float:
        """Waits for the stage's step in progress, and then passes in pieces."""
        layout, piece = self.roofline.layout, self._piece
        stage = sum(self._pass(sequences, piece * layout.data, piece * layout.data).values()) / layout.stages
        return tpot / layout.stages + (math.ceil(self.traffic.prompt / piece) + layout.stages - 1) * stage


def _last(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which it holds, if it holds up to some number; 0: for none."""
    if holds(limit):
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
