"""Predicts when requests get their first and last tokens, given current load: an estimate within a few
milliseconds.

Not a simulation: similar sequences are grouped, a step costs its programs and mean work, and pages are
counted rather than allocated. `jengine simulate` runs the scheduler itself.

The work is bounded whatever the queue is: one pass over the sequences to group them, then at most ITERATIONS
iterations for the queue and NEW_ITERATIONS for each new job. Each iteration computes prompts or ends a group.
What a queue needs beyond that is assumed to take as long, for each token, as what came before.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jengine.scheduling.admission.strategies import best_tiles
from jengine.scheduling.step_plan import Work

GROUPS = 32  # maximum number of groups of decoding sequences, of begun prompts and of waiting sequences
ITERATIONS, NEW_ITERATIONS = 512, 8  # most iterations for the queue, and in addition for each new job
LEAST = 1e-9  # seconds; no step is assumed to take less


class SequenceGroup(NamedTuple):
    """A group of sequences that are assumed to behave equally.

    Attributes:
        start: number of computed tokens.
        end: number of known tokens. Those after `start` are computed first, in tiles.
        rest: tokens that each sequence is expected to generate.
        size: number of sequences.
        number: identifies a request to predict; None: another request. If several jobs have the same number,
            the request's first token is the earliest of theirs, and its last token the latest.
    """

    start: int
    end: int
    rest: int
    size: int = 1
    number: int | None = None


class Prediction(NamedTuple):
    """Predicted seconds from now until a request's first and last token."""

    first_token: float
    last_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """An engine's capacity.

    Attributes:
        max_rows: maximum number of running sequences.
        tile_size, tile_buckets: tokens of a tile, and numbers of tiles for which there are programs.
        max_tokens: maximum tokens in a step, rows and tiles together.
        page_size: tokens in a page.
        pages: pages that are free or evictable; each token needs room in `groups` cache groups.
        most_on_rows: most tokens of a prompt that may lie on rows rather than in a tile; see RowsOrTiles.
        seconds: duration of a step by rows, tiles and work.
        start: seconds until the next step starts.
    """

    max_rows: int
    tile_size: int
    tile_buckets: Sequence[int]
    max_tokens: int
    page_size: int
    pages: int
    groups: int
    seconds: Callable[[int, int, Work], float]
    most_on_rows: int = 0
    start: float = 0.0


def together(jobs: Iterable[SequenceGroup], groups: int = GROUPS) -> list[SequenceGroup]:
    """Merges neighbouring jobs into at most `groups` jobs, each with the mean of those it replaces."""
    some = list(jobs)
    size = -(-len(some) // groups)
    return some if size < 2 else [_mean(some[i : i + size]) for i in range(0, len(some), size)]


def _mean(jobs: list[SequenceGroup]) -> SequenceGroup:
    """Has tokens to compute if any of these has some."""
    count = len(jobs)
    start, tokens, rest = (
        sum(column) / count
        for column in zip(*[(job.start, job.end - job.start, job.rest) for job in jobs], strict=True)
    )
    begin = round(start)
    return SequenceGroup(
        begin,
        begin + math.ceil(tokens) if tokens < 1.0 else begin + round(tokens),
        max(round(rest), 1),
        count,
    )


class Forecast:
    """A forecast for the jobs in `new`, which are queued behind all others.

    Args:
        running: in any order, except that unfinished prompts (end > start) are in the order in which they are
            computed.
        waiting: in queue order.

    Attributes:
        iterations: number of iterations so far.
        limit: maximum number of iterations.
    """

    def __init__(
        self,
        machine: Machine,
        running: Iterable[SequenceGroup],
        waiting: Iterable[SequenceGroup],
        new: Sequence[SequenceGroup],
    ) -> None:
        self.iterations, self.limit = 0, ITERATIONS + NEW_ITERATIONS * len(new)
        self._machine, self._now, self._ran = machine, machine.start, 0  # _ran: steps so far
        begun: list[SequenceGroup] = []
        decoding: list[SequenceGroup] = []
        for job in running:
            (begun if job.end > job.start else decoding).append(job)
        self._waiting = deque([*together(waiting), *new])
        self._prompts = deque(together(begun))
        self._computed = 0  # tiles of the first prompt's first member that are computed
        self._pages, self._context, self._rows, self._running = (
            machine.pages,
            0,
            0,
            sum([job.size for job in begun]),
        )
        self._tokens = 0  # tokens computed and generated so far
        # heap of decoding jobs: (last step, first step, tie-break, job)
        self._ends: list[tuple[int, int, int, SequenceGroup]] = []
        self._entered = 0
        for job in together(sorted(decoding, key=lambda job: job.rest)):
            self._running += job.size
            self._decode(job)
        self._open = sum([job.size for job in new])  # members of jobs in `new` that have not ended
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def run(self) -> dict[int, Prediction]:
        """The predictions."""
        while self._open and self.iterations < self.limit:
            self.iterations += 1
            self._admit()
            if self._prompts:
                self._mixed()
            else:
                self._steps(self._ends[0][0] - self._ran, 0, 0)
            self._end()
        if self._open:
            self._extrapolate()
        return {number: Prediction(self._first[number], self._last[number]) for number in self._last}

    def _pages_of(self, job: SequenceGroup, tokens: int) -> int:
        return job.size * self._machine.groups * -(-tokens // self._machine.page_size)

    def _admit(self) -> None:
        """Admits waiting jobs, as far as rows and pages allow; at least one member if nothing runs."""
        while self._waiting:
            job = self._waiting[0]
            each = (self._pages_of(job, job.end) - self._pages_of(job, job.start)) // job.size
            fitting = min(
                job.size,
                self._machine.max_rows - self._running,
                (self._pages - self._running) // max(each, 1),
            )
            size = fitting if self._running else max(fitting, 1)
            if size <= 0:
                return
            self._waiting.popleft()
            if size < job.size:
                self._waiting.appendleft(job._replace(size=job.size - size))
            self._prompts.append(job._replace(size=size))
            self._running += size
            self._pages -= size * each

    def _mixed(self) -> None:
        """Steps that compute the first prompts, with as many tiles each as the first job fills, or one."""
        machine = self._machine
        room = max((machine.max_tokens - self._rows) // machine.tile_size, 1)
        pending = -self._computed
        for job in self._prompts:
            pending += job.size * self._tiles(job)
            if pending >= room:
                break
        tiles = self._best(min(pending, room))
        first = self._prompts[0]
        count = max((first.size * self._tiles(first) - self._computed) // tiles, 1)
        before = self._tokens
        done, attended = self._compute(count * tiles)
        # whole prompts of one tile each; others are assumed to need their tiles
        short = sum([job.size for job in done]) == count * tiles
        self._steps(count, tiles, attended // count, -(-(self._tokens - before) // count) if short else 0)
        for job in done:
            if job.number is not None:
                self._first.setdefault(job.number, self._now)
            self._decode(job)

    def _compute(self, tiles: int) -> tuple[list[SequenceGroup], int]:
        """Computes this many tiles of prompts, one member after the other. Returns the members whose prompts
        are complete, and the (query, key) pairs that were attended to.
        """
        done: list[SequenceGroup] = []
        attended = 0
        while tiles > 0 and self._prompts:
            job, before = self._prompts.popleft(), self._computed
            each = self._tiles(job)
            tiles += before
            members = min(tiles // each, job.size)
            tiles -= members * each
            self._computed = 0
            if members:
                done.append(job._replace(size=members))
            if members < job.size:
                self._prompts.appendleft(job._replace(size=job.size - members))
                self._computed, tiles = tiles, 0
            self._tokens += members * (job.end - job.start)
            attended += (
                members * self._pairs(job, each) + self._pairs(job, self._computed) - self._pairs(job, before)
            )
        return done, attended

    def _tiles(self, job: SequenceGroup) -> int:
        """Tiles of each member, at least 1."""
        return max(-(-(job.end - job.start) // self._machine.tile_size), 1)

    def _pairs(self, job: SequenceGroup, tiles: int) -> int:
        """(query, key) pairs of a member's first tiles."""
        tokens = min(tiles * self._machine.tile_size, job.end - job.start)
        return tokens * (job.start + tokens // 2)

    def _best(self, pending: int) -> int:
        """Number of tiles with the most useful tokens a second, as the throughput strategy has it."""
        machine = self._machine

        def seconds(rows: int, tiles: int) -> float:
            return max(machine.seconds(rows, tiles, Work(self._context)), LEAST)

        return best_tiles(self._rows, pending, machine.tile_size, machine.tile_buckets, seconds) or 1

    def _steps(self, count: int, tiles: int, attended: int, tokens: int = 0) -> None:
        """Runs equal steps, in each of which every row gets a token.

        tokens: of the tiles, if they may lie on rows instead; otherwise 0.
        """
        machine, grown = self._machine, self._rows * count
        work = Work(self._context + grown // 2, self._context // max(self._rows, 1), attended)
        seconds = machine.seconds(self._rows, tiles, work)
        if 0 < tokens <= min(tiles * machine.most_on_rows, machine.max_rows - self._rows):
            longest = max(work.longest, attended // tokens)
            on_rows = Work(work.context + attended, longest)
            seconds = min(seconds, machine.seconds(self._rows + tokens, 0, on_rows))
        self._now += count * seconds
        self._ran += count
        self._context += grown
        self._tokens += grown
        self._pages -= self._machine.groups * grown // self._machine.page_size

    def _decode(self, job: SequenceGroup) -> None:
        """Starts decoding a job. Its context grows with each step until its last."""
        rest = job.rest - 1 if job.end > job.start else job.rest
        heapq.heappush(self._ends, (self._ran + rest, self._ran, self._entered, job))
        self._entered += 1
        self._rows += job.size
        self._context += job.size * job.end

    def _end(self) -> None:
        while self._ends and self._ends[0][0] <= self._ran:
            _, since, _, job = heapq.heappop(self._ends)
            tokens = job.end + self._ran - since
            self._rows -= job.size
            self._running -= job.size
            self._context -= job.size * tokens
            self._pages += self._pages_of(job, tokens)
            if job.number is not None:
                self._last[job.number] = self._now
                self._open -= job.size

    def _extrapolate(self) -> None:
        """Predicts the rest: each token takes as long as those so far, and the queue stays in order."""
        each = (self._now - self._machine.start) / max(self._tokens, 1)
        step = self._machine.seconds(max(self._rows, 1), 0, Work(self._context))
        for last, _, _, job in self._ends:
            if job.number is not None:
                self._last[job.number] = self._now + (last - self._ran) * step
        ahead = sum([(last - self._ran) * job.size for last, _, _, job in self._ends])
        for job in [*self._prompts, *self._waiting]:
            if job.number is not None:
                first = self._now + (ahead + job.end - job.start) * each
                self._first.setdefault(job.number, first)
                self._last[job.number] = (
                    self._now + (ahead + job.size * (job.end - job.start)) * each + job.rest * step
                )
            ahead += job.size * (job.end - job.start + job.rest)
