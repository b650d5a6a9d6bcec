"""What it costs to verify drafts, and which of them pay."""

from __future__ import annotations

import math
from collections.abc import Sequence as List
from itertools import islice
from typing import NamedTuple

from jengine.scheduling.costs.draft_count import Bucket, HowMany, Offer, all_of_them, could_pay
from jengine.scheduling.costs.predictor import StepPredictor
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.work import NO_WORK, Windows, Work, rows_work


class Rows(NamedTuple):
    """Decode rows of a step, before drafts.

    Attributes:
        longest: length of the longest sequence after the step.
        rank: highest variant_rank of the sequences.
    """

    rows: int
    longest: int
    rank: int
    work: Work

    @classmethod
    def of(cls, sequences: List[Sequence], windows: Windows) -> Rows:
        """One row for each of these sequences."""
        if not sequences:
            return cls(0, 0, 0, NO_WORK)
        positions = [sequence.num_computed for sequence in sequences]
        rank = max([sequence.variant_rank for sequence in sequences])
        return cls(len(sequences), max(positions) + 1, rank, Work(*rows_work(positions, windows)))


class Likely(NamedTuple):
    """Drafts for one sequence.

    Attributes:
        start: position of the first.
        chances: for each, the probability that it and all before it are right.
    """

    start: int
    tokens: list[int]
    chances: list[float]


class DraftCosts:
    """Looks up what programs with rows for drafts cost.

    Args:
        how_many: decides how many drafts a step verifies.
    """

    def __init__(self, predictor: StepPredictor, windows: Windows, how_many: HowMany) -> None:
        self._predictor, self._windows, self._how_many = predictor, windows, how_many

    def offer(self, rows: Rows, tiles: int, limit: float = math.inf, wait: float = 0.0) -> Offer:
        """The programs that such a step may use, still without drafts.

        Args:
            limit: see Offer.
            wait: seconds that the device waits for the host if there are drafts.
        """
        predictor, (count, longest, rank, work) = self._predictor, rows
        room, buckets = predictor.room(count, tiles), list[Bucket]()
        for bucket in predictor.row_buckets(count, tiles):
            # drafts make the longest sequence longer, perhaps by a page bucket
            seconds = predictor.seconds(bucket, tiles, work, longest + min(bucket - count, 1), rank)
            buckets.append(Bucket(min(bucket - count, room), seconds + wait))
        return Offer(count, predictor.row_seconds(count, tiles, work, longest, rank), (), (), buckets, limit)

    def offer_while_in_flight(self, rows: Rows) -> Offer:
        """The same while a step is in flight, which must be read before the next one if that has drafts."""
        wait = sum(self._predictor.costs.host_seconds(rows.rows))
        offer = self.offer(rows, 0, wait=wait)
        return offer._replace(seconds=max(offer.seconds, wait))

    def could_pay(self, offer: Offer) -> bool:
        """Whether it is worth the time to look for drafts."""
        if not offer.tokens or not any([bucket.drafts > 0 for bucket in offer.buckets]):
            return False
        return self._how_many is all_of_them or could_pay(offer)

    def count(self, offer: Offer, likely: List[Likely]) -> int:
        """How many of these drafts to verify."""
        return sum(self.counts(offer, likely))

    def counts(self, offer: Offer, likely: List[Likely]) -> list[int]:
        """How many drafts of each sequence to verify."""
        order = list[tuple[float, int, float]]()
        for number, one in enumerate(likely):
            context, _ = rows_work([one.start], self._windows)
            seconds = self._predictor.costs.work_seconds(Work(context))
            order += [(-chance, number, seconds) for chance in one.chances]
        order.sort()
        chances, contexts = [-chance for chance, _, _ in order], [seconds for _, _, seconds in order]
        counts = [0] * len(likely)
        for _, number, _ in islice(order, self._how_many(offer._replace(chances=chances, contexts=contexts))):
            counts[number] += 1
        return counts
