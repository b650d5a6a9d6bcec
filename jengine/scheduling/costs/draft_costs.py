"""What it costs to verify drafts, and how many of them pay."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as List
from itertools import islice
from typing import NamedTuple

from jengine.scheduling.costs.predictor import StepPredictor
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.step_plan import NO_WORK, Windows, Work, further_work, rows_work

REUSED = 16  # steps that use the same costs of programs


class Rows(NamedTuple):
    """Decode rows of a step, before drafts.

    Attributes:
        rows: their number, each of another sequence.
        taken: rows that the step needs without drafts: also for the ends of prompts, and for their samples.
        longest: length of the longest sequence after the step.
        rank: highest variant_rank of the sequences.
    """

    rows: int
    taken: int
    longest: int
    rank: int
    work: Work

    @classmethod
    def of(cls, sequences: List[Sequence], windows: Windows) -> Rows:
        """One row for each of these sequences."""
        if not sequences:
            return cls(0, 0, 0, 0, NO_WORK)
        positions = [sequence.num_computed for sequence in sequences]
        rank = max([sequence.variant_rank for sequence in sequences])
        count = len(sequences)
        return cls(count, count, max(positions) + 1, rank, rows_work(positions, windows))


class Likely(NamedTuple):
    """Drafts for one sequence.

    Attributes:
        start: position of the first.
        chances: for each, the probability that it and all before it are right.
    """

    start: int
    tokens: list[int]
    chances: list[float]

    @property
    def proposed(self) -> bool:
        """Whether a draft model proposes the tokens on the device."""
        return self.tokens[0] < 0


class DraftCosts:
    """Looks up what programs with rows for drafts cost.

    Args:
        how_many: decides how many drafts a step verifies.

    Attributes:
        expected: tokens a second that the last drafts were expected to give, relative to none.
    """

    def __init__(self, predictor: StepPredictor, windows: Windows, how_many: HowMany) -> None:
        self._predictor, self._windows, self._how_many = predictor, windows, how_many
        self._known: dict[tuple[int, ...], tuple[float, list[Bucket], float]] = {}  # see _programs
        self._uses, self.expected = 0, 1.0

    def offer(self, rows: Rows, tiles: int, limit: float = math.inf, wait: float = 0.0) -> Offer:
        """The programs that such a step may use, still without drafts.

        Seconds are those that the rows add to prompts. What prompts take is spent with drafts or without, and
        must not make them look cheap.

        Args:
            limit: see Offer; of the whole step.
            wait: seconds that the device waits for the host if there are drafts.
        """
        alone, buckets, prompts = self._programs(rows, tiles)
        seconds = self._predictor.costs.work_seconds(rows.work._replace(attended=0))
        limit -= prompts + self._predictor.costs.work_seconds(Work(attended=rows.work.attended))
        return Offer(
            rows.rows,
            alone + seconds,
            (),
            (),
            [Bucket(drafts, base + seconds + wait) for drafts, base in buckets],
            limit,
        )

    def _programs(self, rows: Rows, tiles: int) -> tuple[float, list[Bucket], float]:
        """Seconds without work: of the rows without drafts, of programs with rows for drafts beyond the
        seconds for prompts, and of prompts. Looked up once in REUSED steps.
        """
        predictor, (count, taken, longest, rank, _) = self._predictor, rows
        self._uses = (self._uses + 1) % REUSED
        if not self._uses:
            self._known.clear()
        key = count, taken, tiles, rank, predictor.pages(longest + 1)  # drafts may enter another page
        if key not in self._known:
            room = predictor.room(taken, tiles)
            alone = predictor.row_seconds(count, longest, rank)
            prompts = 0.0
            if taken > count or tiles:
                prompts = predictor.seconds(taken, tiles, NO_WORK, longest, rank) - alone
            buckets = [
                Bucket(
                    min(bucket - taken, room),
                    predictor.seconds(bucket, tiles, NO_WORK, longest + 1, rank) - prompts,
                )
                for bucket in predictor.row_buckets(taken, tiles)
            ]
            self._known[key] = alone, buckets, prompts
        return self._known[key]

    def offer_while_in_flight(self, rows: Rows) -> Offer:
        """The offer while a step is in flight, which must be read before the next one if that has drafts."""
        wait = sum(self._predictor.costs.host_seconds(rows.rows))
        offer = self.offer(rows, 0, wait=wait)
        return offer._replace(seconds=max(offer.seconds, wait))

    def could_pay(self, offer: Offer) -> bool:
        """Whether it is worth the time to look for drafts."""
        if not offer.tokens or not any([bucket.drafts > 0 for bucket in offer.buckets]):
            return False
        return self._how_many is all_of_them or could_pay(offer)

    def counts(self, offer: Offer, likely: List[Likely]) -> list[int]:
        """How many drafts of each sequence to verify. A draft model costs the same for few and for many."""
        if count := sum([drafts.proposed for drafts in likely]):
            seconds = self._predictor.draft_seconds(count, max([drafts.start for drafts in likely]))
            dearer = [bucket._replace(seconds=bucket.seconds + seconds) for bucket in offer.buckets]
            counts = self._counts(offer._replace(buckets=dearer), likely)
            if any([number and drafts.proposed for number, drafts in zip(counts, likely, strict=True)]):
                return counts
            likely = [drafts._replace(chances=[]) if drafts.proposed else drafts for drafts in likely]
        return self._counts(offer, likely)

    def _counts(self, offer: Offer, likely: List[Likely]) -> list[int]:
        order = list[tuple[float, int, float]]()
        for number, drafts in enumerate(likely):
            work = Work(further_work(drafts.start, 1, self._windows).context)
            seconds = self._predictor.costs.work_seconds(work)
            order += [(-chance, number, seconds) for chance in drafts.chances]
        order.sort()
        chances, contexts = [-chance for chance, _, _ in order], [seconds for _, _, seconds in order]
        offer = offer._replace(chances=chances, contexts=contexts)
        taken, counts = self._how_many(offer), [0] * len(likely)
        for _, number, _ in islice(order, taken):
            counts[number] += 1
        self.expected = gain(offer, taken)
        return counts


# Drafts must promise so many times the tokens a second of a step without them. Costs and chances are
# estimates, and what looks best among estimates is on average worse than it looks.
WORTH = 1.03


class Bucket(NamedTuple):
    """A program that has rows for drafts.

    Attributes:
        drafts: number of rows that the step leaves for them.
        seconds: predicted seconds of the step with this program, without the drafts' contexts.
    """

    drafts: int
    seconds: float


class Offer(NamedTuple):
    """Drafts that a step could verify.

    Attributes:
        tokens: number of tokens that the step yields without drafts.
        seconds: that it takes without drafts.
        chances: for each draft, the probability that it becomes output; the likeliest first.
        contexts: seconds that each draft's row needs to read its context.
        buckets: programs, the smallest first.
        limit: seconds within which the step should end, because a request's next token is due.
    """

    tokens: int
    seconds: float
    chances: List[float]
    contexts: List[float]
    buckets: List[Bucket]
    limit: float = math.inf


HowMany = Callable[[Offer], int]


def most_a_second(offer: Offer) -> int:
    """How many drafts, the likeliest first, give most tokens a second; 0: drafts hardly pay."""
    best, best_rate = 0, WORTH * offer.tokens / offer.seconds
    expected, contexts, at = float(offer.tokens), 0.0, 0
    for drafts, seconds in offer.buckets:
        while at < min(drafts, len(offer.chances)):
            expected += offer.chances[at]
            contexts += offer.contexts[at]
            at += 1
            taken = seconds + contexts
            if expected > best_rate * taken and taken <= offer.limit:
                best, best_rate = at, expected / taken
    return best


def gain(offer: Offer, count: int) -> float:
    """Expected tokens a second with this many drafts, relative to none."""
    if not count:
        return 1.0
    seconds = next(bucket.seconds for bucket in offer.buckets if bucket.drafts >= count)
    expected = offer.tokens + sum(offer.chances[:count])
    return expected * offer.seconds / (offer.tokens * (seconds + sum(offer.contexts[:count])))


def all_of_them(offer: Offer) -> int:
    """Every draft that has a row."""
    return min(len(offer.chances), max([bucket.drafts for bucket in offer.buckets], default=0))


def could_pay(offer: Offer) -> bool:
    """Whether drafts would pay if all of them were right, and read nothing."""
    return any(
        bucket.drafts
        and bucket.seconds <= offer.limit
        and (offer.tokens + bucket.drafts) * offer.seconds > WORTH * offer.tokens * bucket.seconds
        for bucket in offer.buckets
    )
