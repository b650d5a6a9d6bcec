"""Which targets can be promised: whether all requests that were accepted get their tokens in time, and how fast prompts must go."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

EPSILON = 1e-9  # seconds, for sums of floats


class Prompt(NamedTuple):
    """A prompt that is not computed yet, in the order in which they are computed.

    Attributes:
        tiles: it still takes.
        slack: seconds until its first token is due; inf: it has no target.
    """

    tiles: int
    slack: float


class Outlook(NamedTuple):
    """All that was accepted, at the start of a step. Costs are upper bounds, with every request decoding at its full length.

    Attributes:
        decode: seconds of a step without prompts.
        mixed: seconds of a step with so many tiles.
        tpot: the shortest time between tokens that any of them was promised; inf: none was.
        slack: seconds until the first of the running streams' next tokens is due; inf: none is.
    """

    decode: float
    mixed: Callable[[int], float]
    tpot: float
    slack: float
    prompts: Sequence[Prompt]

    @property
    def targets(self) -> bool:
        """Whether there are any."""
        return min(self.tpot, self.slack, *[prompt.slack for prompt in self.prompts]) < math.inf


class Pace(NamedTuple):
    """Steps with `tiles` tiles, each as soon as no stream's next token would be late for it.

    Attributes:
        first: steps without prompts before the first of them.
        regain: and between two of them.
        period: seconds from one to the next.
        mixed: seconds of one.
    """

    tiles: int
    first: int
    regain: int
    period: float
    mixed: float


def pace(outlook: Outlook, tiles: int) -> Pace | None:
    """The pace with this many tiles a step that keeps every stream in time; None: there is none."""
    decode, tpot = outlook.decode, outlook.tpot
    if decode > min(tpot, outlook.slack) + EPSILON:
        return None
    mixed = outlook.mixed(tiles)
    first, regain = _steps(mixed - outlook.slack, tpot - decode), _steps(mixed - tpot, tpot - decode)
    if first is None or regain is None:
        return None
    return Pace(tiles, first, regain, mixed + regain * decode, mixed)


def keeps(outlook: Outlook, at: Pace) -> bool:
    """Whether every prompt gets its first token in time at this pace.

    It stays so if requests end early, and if steps take less: each step then begins no later and with no less slack.
    """
    begin = outlook.decode * at.first + at.mixed - at.period
    total = 0
    for prompt in outlook.prompts:
        total += prompt.tiles
        if begin + -(-total // at.tiles) * at.period > prompt.slack + EPSILON:
            return False
    return True


def promised_pace(outlook: Outlook, buckets: Sequence[int]) -> Pace | None:
    """The fastest pace at which every stream and every prompt is in time. None: not all of them are sure to be."""
    paces = [at for tiles in buckets if (at := pace(outlook, tiles)) is not None and keeps(outlook, at)]
    return max(paces, key=lambda at: at.tiles / at.period, default=None)


def _steps(missing: float, gain: float) -> int | None:
    """Steps that make up for this many seconds, each for `gain` of them; None: they never do."""
    if missing <= EPSILON:
        return 0
    return math.ceil((missing - EPSILON) / gain) if gain > EPSILON else None
