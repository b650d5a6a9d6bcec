"""Predicts when requests get their first and last tokens, given current load: an estimate within a few milliseconds.

Not a simulation: similar sequences are grouped, a step costs its programs and mean work, and pages are counted
rather than allocated. `jengine simulate` runs the scheduler itself.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jengine.scheduling.work import Work

GROUPS = 32  # maximum number of groups of running and of waiting sequences


class Job(NamedTuple):
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
    start: float = 0.0


def together(jobs: Iterable[Job], groups: int = GROUPS) -> list[Job]:
    """Merges neighbouring jobs into at most `groups` jobs, each with the mean of those it replaces."""
    some = list(jobs)
    size = -(-len(some) // groups)
    return some if size < 2 else [_mean(some[i : i + size]) for i in range(0, len(some), size)]


def _mean(jobs: list[Job]) -> Job:
    count = len(jobs)
    start, end, rest = (round(sum(column) / count) for column in zip(*[job[:3] for job in jobs], strict=True))
    return Job(start, end, max(rest, 1), count)


def forecast(machine: Machine, running: Iterable[Job], waiting: Iterable[Job], new: Sequence[Job]) -> dict[int, Prediction]:
    """Predictions by number for the jobs in `new`, which are queued behind all others.

    Args:
        running: in any order, except that unfinished prompts (end > start) are in the order in which they are computed.
        waiting: in queue order.
    """
    return _Forecast(machine, running, waiting, new).run()


class _Forecast:
    def __init__(self, machine: Machine, running: Iterable[Job], waiting: Iterable[Job], new: Sequence[Job]) -> None:
        self.machine, self.now, self.steps = machine, machine.start, 0
        begun: list[Job] = []
        decoding: list[Job] = []
        for job in running:
            (begun if job.end > job.start else decoding).append(job)
        self.waiting = deque([*together(waiting), *new])
        self.prompts = deque(begun)
        self.pages, self.context, self.rows, self.running = machine.pages, 0, 0, sum(job.size for job in begun)
        self.ends: list[tuple[int, int, int, Job]] = []  # heap of decoding jobs: (last step, first step, tie-break, job)
        self.entered = 0
        for job in together(sorted(decoding, key=lambda job: job.rest)):
            self.running += job.size
            self._decode(job)
        self.open = len(new)  # number of jobs in `new` that have not ended
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}

    def run(self) -> dict[int, Prediction]:
        while self.open:
            self._admit()
            if self.prompts:
                self._mixed()
            elif self.ends:
                self._steps(self.ends[0][0] - self.steps, 0, 0)
            else:
                break  # a job in `new` can never fit
            self._end()
        return {number: Prediction(self.first[number], self.last[number]) for number in self.last}

    def _pages_of(self, job: Job, tokens: int) -> int:
        return job.size * self.machine.groups * -(-tokens // self.machine.page_size)

    def _admit(self) -> None:
        while self.waiting:
            job, free = self.waiting[0], self.machine.max_rows - self.running
            if 0 < free < job.size:
                self.waiting[0] = job._replace(size=job.size - free)
                job = job._replace(size=free)
                self.waiting.appendleft(job)
            alone = not self.running
            needed = self._pages_of(job, job.end) - self._pages_of(job, job.start)
            if not alone and (free <= 0 or needed + self.running > self.pages):
                return
            self.waiting.popleft()
            self.prompts.append(job)
            self.running += job.size
            self.pages -= needed

    def _mixed(self) -> None:
        """Steps that compute the first prompt, and parts of other prompts if there is room."""
        machine, size = self.machine, self.machine.tile_size
        most = max((machine.max_tokens - self.rows) // size, 1)
        pending = 0
        for job in self.prompts:
            pending += self._tiles(job)
            if pending >= most:
                break
        tiles = self._best(min(pending, most))
        count = max(self._tiles(self.prompts[0]) // tiles, 1)
        left, attended = count * tiles, 0
        done: list[Job] = []
        while left > 0 and self.prompts:
            job = self.prompts.popleft()
            own = self._tiles(job)
            used = min(own, left)
            tokens = (job.end - job.start) * used // own
            attended += job.size * tokens * (job.start + tokens // 2)
            left -= used
            if used < own:
                self.prompts.appendleft(job._replace(start=job.start + tokens))
            else:
                done.append(job)
        self._steps(count, tiles, attended // count)
        for job in done:
            if job.number is not None:
                self.first.setdefault(job.number, self.now)
            self._decode(job)

    def _tiles(self, job: Job) -> int:
        return job.size * -(-(job.end - job.start) // self.machine.tile_size)

    def _best(self, pending: int) -> int:
        """Number of tiles with the most useful tokens a second, as in strategies.throughput."""
        machine, best, best_rate = self.machine, 1, 0.0
        for bucket in machine.tile_buckets:
            tiles = min(bucket, pending)
            rate = (self.rows + tiles * machine.tile_size) / machine.seconds(self.rows, tiles, Work(self.context))
            if rate >= best_rate:
                best, best_rate = tiles, rate
            if bucket >= pending:
                break
        return best

    def _steps(self, count: int, tiles: int, attended: int) -> None:
        """Runs equal steps, in each of which every row gets a token."""
        grown = self.rows * count
        work = Work(self.context + grown // 2, self.context // max(self.rows, 1), attended)
        self.now += count * self.machine.seconds(self.rows, tiles, work)
        self.steps += count
        self.context += grown
        self.pages -= self.machine.groups * grown // self.machine.page_size

    def _decode(self, job: Job) -> None:
        """Starts decoding a job. Its context grows with each step until its last."""
        rest = job.rest - 1 if job.end > job.start else job.rest
        heapq.heappush(self.ends, (self.steps + rest, self.steps, self.entered, job))
        self.entered += 1
        self.rows += job.size
        self.context += job.size * job.end

    def _end(self) -> None:
        while self.ends and self.ends[0][0] <= self.steps:
            _, since, _, job = heapq.heappop(self.ends)
            tokens = job.end + self.steps - since
            self.rows -= job.size
            self.running -= job.size
            self.context -= job.size * tokens
            self.pages += self._pages_of(job, tokens)
            if job.number is not None:
                self.last[job.number] = self.now
                self.open -= 1
