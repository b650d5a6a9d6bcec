"""Decides which targets can be promised: whether all accepted requests get their tokens in time, and how to
pace prompts.

Prompts can be computed beside streams in two ways:

- in a burst: steps with tiles follow one another until no prompt is left. A stream of known length only has
to
  be in time at its end, so it can catch up later; other streams have to be in time at every token.
- paced: a step with tiles runs whenever it delays no stream's next token beyond its due time. Decode steps in
  between let streams regain slack.

If one of the two is found to meet all targets, it still does so after the resulting step, also if requests
end early or steps take less time than assumed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

EPSILON = 1e-9  # seconds; tolerance for sums of floats


class Prompt(NamedTuple):
    """A prompt that is not computed yet. Prompts are listed in the order in which they are computed.

    Attributes:
        tiles: number of tiles left to compute.
        slack: seconds until its first token is due; inf: it has no target.
        tpot: promised seconds between its tokens; inf: no promise.
        length: number of tokens it generates after the first; None: unknown.
    """

    tiles: int
    slack: float
    tpot: float = math.inf
    length: int | None = None


class Stream(NamedTuple):
    """A decoding sequence.

    Attributes:
        slack: seconds until its next token is due.
        tpot: as in Prompt.
        length: number of tokens still to come; None: unknown.
    """

    slack: float
    tpot: float = math.inf
    length: int | None = None


class Outlook(NamedTuple):
    """All accepted work at the start of a step. Costs are upper bounds: every request decodes at its full
    length.

    Attributes:
        decode: seconds of a step without prompts.
        mixed: seconds of a step, given its tiles and the (query, key) pairs that these attend to.
        streams: sequences with promises.
        attended: total pairs of the prompts' first 0, 1, 2 ... tiles.
    """

    decode: float
    mixed: Callable[[int, int], float]
    streams: Sequence[Stream]
    prompts: Sequence[Prompt]
    attended: Sequence[int]

    def steps(self, tiles: int) -> list[float]:
        """Seconds of each step if prompts are computed with this many tiles per step. The last step has the
        remaining tiles."""
        marks = [*range(0, len(self.attended) - 1, tiles), len(self.attended) - 1]
        return [
            self.mixed(end - begin, self.attended[end] - self.attended[begin])
            for begin, end in pairwise(marks)
        ]

    @property
    def targets(self) -> bool:
        """Whether any sequence has a target."""
        return bool(self.streams) or any(min(prompt.slack, prompt.tpot) < math.inf for prompt in self.prompts)

    @property
    def slack(self) -> float:
        """Seconds until the first due token of any stream; inf: no token is due."""
        return min([stream.slack for stream in self.streams], default=math.inf)

    @property
    def effort(self) -> int:
        """Approximate number of iterations that `best_way` takes."""
        watched = [
            promise
            for kind in (self.streams, self.prompts)
            for promise in kind
            if promise.length is None and promise.tpot < math.inf
        ]
        return len(self.attended) * (2 + 2 * len(watched)) + len(self.streams) + len(self.prompts)

    @property
    def tpot(self) -> float:
        """The shortest promised time between tokens; inf: none was promised."""
        return min(
            [promise.tpot for kind in (self.streams, self.prompts) for promise in kind], default=math.inf
        )


class Way(NamedTuple):
    """A way to compute prompts: in steps of `tiles` tiles, as many steps as needed.

    Attributes:
        burst: whether the steps follow one another, rather than being paced.
        late: number of requests that would miss their targets.
        seconds: time until all prompts are computed.
    """

    tiles: int
    burst: bool
    late: int
    seconds: float


def best_way(outlook: Outlook, buckets: Sequence[int]) -> Way:
    """The way with the fewest late requests, then the fastest. None late: all targets are guaranteed."""
    ways = [
        way for tiles in buckets for way in (_burst(outlook, tiles), _pace(outlook, tiles)) if way is not None
    ]
    return min(ways, key=lambda way: (way.late, way.seconds))


def _pace(outlook: Outlook, tiles: int) -> Way | None:
    """Paced: tiles whenever they make no stream late. None: streams lose more than they regain."""
    decode, tpot, mixed = outlook.decode, outlook.tpot, max(outlook.steps(tiles))
    first, regain = _steps(mixed - outlook.slack, tpot - decode), _steps(mixed - tpot, tpot - decode)
    if first is None or regain is None:
        return None
    late = sum([not _bears(stream, (0.0,), decode) for stream in outlook.streams]) + (decode > tpot + EPSILON)
    begin, total = first * decode - regain * decode, 0
    for prompt in outlook.prompts:
        total += prompt.tiles
        done = begin + -(-total // tiles) * (mixed + regain * decode)
        late += done > prompt.slack + EPSILON
    return Way(tiles, False, late, begin + -(-total // tiles) * (mixed + regain * decode))


def _burst(outlook: Outlook, tiles: int) -> Way:
    """Burst: all prompts first."""
    ends = [0.0, *accumulate(outlook.steps(tiles))]
    late = sum([not _bears(stream, ends, outlook.decode) for stream in outlook.streams])
    total = 0
    for prompt in outlook.prompts:
        total += prompt.tiles
        done = -(-total // tiles)
        begun = Stream(prompt.tpot, prompt.tpot, prompt.length)
        late += ends[done] > prompt.slack + EPSILON or not _bears(begun, ends, outlook.decode, done)
    return Way(tiles, True, late, ends[-1])


def _bears(stream: Stream, ends: Sequence[float], decode: float, since: int = 0) -> bool:
    """Whether a stream stays in time, given tokens at the ends of mixed steps and then of decode steps.

    The first of these mixed steps begins at ends[since].
    """
    slack, tpot, length = stream
    if tpot == math.inf or length == 0:
        return True
    begin, steps = ends[since], len(ends) - 1 - since
    if length is not None:
        seen = min(steps, length)
        return ends[since + seen] - begin + (length - seen) * decode <= slack + (length - 1) * tpot + EPSILON
    if decode > tpot + EPSILON or decode > slack + EPSILON:
        return False
    return all(ends[since + i] - begin <= slack + (i - 1) * tpot + EPSILON for i in range(1, steps + 1))


def _steps(missing: float, gain: float) -> int | None:
    """Number of steps that recover `missing` seconds at `gain` seconds per step; None: never."""
    if missing <= EPSILON:
        return 0
    return math.ceil((missing - EPSILON) / gain) if gain > EPSILON else None
