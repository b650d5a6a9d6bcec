"""Which targets can be promised: whether all requests that were accepted get their tokens in time, and how fast prompts must go.

There are two ways in which prompts can be computed beside streams:

- in a burst: one step of tiles after the other, until no prompt is left. Streams whose lengths are known must only be in time
  at their ends, so they can make up for it later; the others must be in time at each token.
- at a pace: each step of tiles when no stream's next token is late for it, and decode steps in between, in which streams gain what
  they lose.

Where either is found to keep everything in time, it still does after the step that follows from it; also if requests end early, and
if steps take less than what is assumed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

EPSILON = 1e-9  # seconds, for sums of floats


class Prompt(NamedTuple):
    """A prompt that is not computed yet, in the order in which they are computed.

    Attributes:
        tiles: it still takes.
        slack: seconds until its first token is due; inf: it has no target.
        tpot: seconds between its tokens then, as promised; inf: no matter how many.
        length: tokens it generates after the first; None: it is not known.
    """

    tiles: int
    slack: float
    tpot: float = math.inf
    length: int | None = None


class Stream(NamedTuple):
    """A sequence that decodes.

    Attributes:
        slack: seconds until its next token is due.
        tpot: as for a prompt.
        length: tokens still to come; None: it is not known.
    """

    slack: float
    tpot: float = math.inf
    length: int | None = None


class Outlook(NamedTuple):
    """All that was accepted, at the start of a step. Costs are upper bounds, with every request decoding at its full length.

    Attributes:
        decode: seconds of a step without prompts.
        mixed: seconds of a step with so many tiles, which attend to so many (query, key) pairs.
        streams: those that were promised anything.
        attended: pairs of the prompts' first 0, 1, 2 ... tiles together.
    """

    decode: float
    mixed: Callable[[int, int], float]
    streams: Sequence[Stream]
    prompts: Sequence[Prompt]
    attended: Sequence[int]

    def steps(self, tiles: int) -> list[float]:
        """Seconds of each of the steps in which the prompts are computed, with this many tiles each, the last with what is left."""
        marks = [*range(0, len(self.attended) - 1, tiles), len(self.attended) - 1]
        return [self.mixed(end - begin, self.attended[end] - self.attended[begin]) for begin, end in pairwise(marks)]

    @property
    def targets(self) -> bool:
        """Whether there are any."""
        return bool(self.streams) or any(min(prompt.slack, prompt.tpot) < math.inf for prompt in self.prompts)

    @property
    def slack(self) -> float:
        """Seconds until the first of the streams' next tokens is due; inf: none is."""
        return min([stream.slack for stream in self.streams], default=math.inf)

    @property
    def tpot(self) -> float:
        """The shortest time between tokens that was promised; inf: none was."""
        return min([one.tpot for some in (self.streams, self.prompts) for one in some], default=math.inf)


class Way(NamedTuple):
    """How prompts are computed: in steps of `tiles` tiles, as many as they take.

    Attributes:
        burst: one step after the other, not at a pace.
        late: requests that miss their targets so.
        seconds: until all prompts are computed.
    """

    tiles: int
    burst: bool
    late: int
    seconds: float


def best_way(outlook: Outlook, buckets: Sequence[int]) -> Way:
    """The way in which the fewest requests are late; of equal ones, the fastest. With none late, everything is sure to be in time."""
    ways = [way for tiles in buckets for way in (_burst(outlook, tiles), _pace(outlook, tiles)) if way is not None]
    return min(ways, key=lambda way: (way.late, way.seconds))


def _pace(outlook: Outlook, tiles: int) -> Way | None:
    """Each step of tiles when no stream's next token is late for it. None: streams lose more than they gain."""
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
    """All prompts first."""
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
    """Whether a stream is in time if it gets tokens at the ends of mixed steps, the first of which begins at ends[since], then of
    decode steps."""
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
    """Steps that make up for this many seconds, each for `gain` of them; None: they never do."""
    if missing <= EPSILON:
        return 0
    return math.ceil((missing - EPSILON) / gain) if gain > EPSILON else None
