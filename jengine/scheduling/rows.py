"""Decode rows: which sequences get one, pages for their tokens, and what a step's collection yields."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

from jengine.scheduling.pages.block_table import Entry
from jengine.scheduling.prompts.prefix_lookup import PendingTiles
from jengine.scheduling.requests.policy import victim
from jengine.scheduling.requests.registry import Registry
from jengine.scheduling.requests.sequence import Sequence, State
from jengine.scheduling.step_plan import NO_WORK, Sample, SlotReset, Span, StepPlan, Tokens, rows_work
from jengine.table.program_table import SamplerKey, TrunkKey

SPREAD = 2  # rounds of the stages over which pending tiles are spread beside rows; more gains little


class Cohorts:
    """As many steps run at once as there are stages. A row reads the token that its sequence got in an
    earlier step. So a sequence gets a row only if its last token is known, or comes from so early a step that
    this one need not wait for it. If there is nothing else to run, the step waits for the oldest one in
    flight. Those that got a token together, a cohort, thus get the next one together, in every
    n-th step of n.

    A step has at most an n-th of all decoding sequences, those whose last step is the longest ago. So
    cohorts remain equal when sequences come and end, and none waits for ever.

    Several ranks step together, so they count the same steps, with or without a part in each.

    Args:
        through_host: whether tokens of earlier steps come from the host, so that a row waits until it has
            read them. There is then one cohort more than stages, whose tokens are on their way.

    Attributes:
        count: number of cohorts.
        waits: whether a step waits for the oldest one in flight if there is nothing else to run. Of several
            ranks, only if none has anything else.
    """

    def __init__(self, stages: int, through_host: bool = False) -> None:
        self.stages, self.through_host = stages, through_host and stages > 1
        self.count = stages + self.through_host
        self.waits = not self.through_host
        self._planned = self._collected = 0  # number, from 1, of the last step
        self._flying = deque[int]()  # numbers of the steps between, without those of other ranks alone
        self._last: dict[Sequence, int] = {}  # number of the step in which it had a row or a sample

    def forget(self, sequence: Sequence) -> None:
        self._last.pop(sequence, None)

    def take(self, decoding: list[Sequence], *, prompts: bool) -> list[Sequence]:
        """The decoding sequences that get a row now, in the same order. prompts: whether there are prompts to
        compute.
        """
        last, ready = self._last, self.ready(decoding)
        if self.waits and not (ready or prompts):
            ready = [sequence for sequence in decoding if last.get(sequence, 0) <= self.oldest]
        share = -(-len(decoding) // self.count)
        if len(ready) <= share:
            return ready
        chosen = {*sorted(ready, key=lambda sequence: last.get(sequence, 0))[:share]}
        return [sequence for sequence in ready if sequence in chosen]

    def ready(self, decoding: list[Sequence]) -> list[Sequence]:
        """The sequences whose step need not wait for another one."""
        last, until = self._last, self._collected
        if not self.through_host:
            until = max(until, self._planned + 1 - self.stages)
        return [sequence for sequence in decoding if last.get(sequence, 0) <= until]

    def planned(self, plan: PlanBuilder) -> int:
        """A step is planned. Returns how many of the last ones in flight it does not wait for."""
        self._planned += 1
        overtaken = 0
        if self.stages > 1:
            needed = max([self._last.get(sequence, 0) for sequence in plan.rows], default=0)
            overtaken = sum([number > needed for number in self._flying])
            for sequence in (*plan.rows, *plan.sampled):
                self._last[sequence] = self._planned
        self._flying.append(self._planned)
        return overtaken

    def passed(self) -> None:
        """Count a step that other ranks have planned without this one."""
        self._planned += 1

    def collected(self) -> None:
        """The oldest step in flight has been read."""
        self._collected = self._flying.popleft()

    @property
    def oldest(self) -> float:
        """Number of the oldest step in flight, without those of other ranks alone; inf: there is none."""
        return self._flying[0] if self._flying else math.inf

    def recent(self, steps: int) -> int:
        """How many of the last `steps` steps are in flight, without those of other ranks alone."""
        return sum([number > self._planned - steps for number in self._flying])

    def share(self, tiles: int, pending: PendingTiles, buckets: List[int], *, rows: int) -> int:
        """How many of these pending tiles a step computes, of `tiles` that it may: an n-th of all, beside
        rows less, rounded up to a bucket. So a prompt's chunks follow each other through the stages, and
        steps are of similar size: a stage waits if the step before was shorter.
        """
        if self.stages == 1:
            return tiles
        steps = self.stages * (SPREAD if rows else 1)
        share = max(-(-pending.count // steps), pending.least)
        return min(tiles, next((bucket for bucket in buckets if bucket >= share), share))

    def check_integrity(self) -> None:
        """Raises AssertionError if steps in flight are not between those collected and planned."""
        numbers = [self._collected, *self._flying]
        assert numbers == sorted({*numbers}) and numbers[-1] <= self._planned, "a step was collected twice"


class PlanBuilder:
    """The parts of a StepPlan, and the sequences behind them.

    Attributes:
        now: time of planning.
        rows: decoding sequences, whose spans come first.
        more_rows: number of rows beyond one for each of these.
        tiles: number of prompt tiles.
        longest: length in tokens of the longest sequence after the step; in a burst, after its first step.
        steps: number of decode steps; more than 1 in a burst.
        lengthened: whether a rule has given rows several tokens.
        guesses: number of drafts.
        paced: whether any row has a target for the time between tokens.
        adapted: the highest place of an adapter of its sequences; 0: none has one.
        rank: highest variant_rank of the sequences that are sampled.
        sampled: sequences that get tokens, in the order of `samples`.
    """

    def __init__(self, now: float) -> None:
        self.now = now
        self.rows: list[Sequence] = []
        self.more_rows = self.tiles = self.longest = self.rank = self.guesses = 0
        self.steps, self.lengthened, self.paced, self.adapted = 1, False, False, 0
        self.spans: list[Span] = []
        self.samples: list[Sample] = []
        self.sampled: list[Sequence] = []
        self.resets: list[SlotReset] = []
        self.table: list[tuple[int, int, int, int]] = []
        self.copies: list[tuple[int, int, int]] = []
        self.work = NO_WORK

    def enter(self, slot: int, entries: Iterable[Entry]) -> None:
        """Updates a slot's block tables."""
        self.table += [(group, slot, index, page) for group, index, page in entries]

    def build(self, trunk: TrunkKey, sampler: SamplerKey) -> StepPlan:
        """The finished plan for these programs."""
        return StepPlan(
            trunk=trunk,
            sampler=sampler,
            spans=self.spans,
            samples=self.samples,
            resets=self.resets,
            table=self.table,
            copies=self.copies,
            work=self.work,
            steps=self.steps,
            prompts=len(self.spans) - len(self.rows),
            rows=len(self.rows) + self.more_rows,
            guesses=self.guesses,
        )


class Rows:
    """
    Attributes:
        last: sequences with a row in the last step that had rows; None if one of them gave up its slot.
    """

    def __init__(self, registry: Registry, cohorts: Cohorts) -> None:
        self._registry, self._blocks, self._windows = registry, registry.blocks, registry.limits.windows
        self._cohorts = cohorts
        self.last: list[Sequence] | None = []
        # of these rows, as are the lists; a loop over a thousand sequences waits for memory
        self._rank, self._paced, self._adapted = 0, False, 0
        self._numbers: list[int] = []
        self._slots: list[int] = []
        self._samples: list[Sample] = []
        self._sharing: dict[Sequence, None] = {}  # running; the page that they write next may be shared
        self._forked: dict[Sequence, None] = {}  # running; the device lacks part of their block tables

    def forget(self, sequence: Sequence) -> None:
        self.last = None
        self._sharing.pop(sequence, None)
        self._forked.pop(sequence, None)

    @property
    def sharing(self) -> bool:
        """Whether a running sequence may write to a shared page next."""
        return bool(self._sharing)

    def share(self, parent: Sequence, child: Sequence) -> None:
        """The two have the same tokens and pages from now on."""
        if parent.num_computed % self._blocks.page_size:
            self._sharing[parent] = self._sharing[child] = None

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives a running child its parent's pages. Its block tables are sent with its next row."""
        self._blocks.replace(parent.number, child.number)
        child.tokens, child.num_computed = [*parent.tokens], parent.num_computed
        self._forked[child] = None
        self.share(parent, child)

    def empty(self, sequence: Sequence) -> None:
        """Takes all pages from a running sequence."""
        self._blocks.empty(sequence.number, sequence.salt)
        sequence.num_computed = 0
        self._forked.pop(sequence, None)

    def decoding(self) -> list[Sequence]:
        """Running sequences that need a row now: not those whose last token is in flight."""
        rows = self._unfinished()
        return rows if self._cohorts.stages == 1 else self._cohorts.take(rows, prompts=self._prompts)

    @property
    def ready(self) -> bool:
        """Whether there is something to run that need not wait for the tokens of a step in flight."""
        return self._prompts or bool(self._cohorts.ready(self._unfinished()))

    def _unfinished(self) -> list[Sequence]:
        decoding, running = State.DECODING, self._registry.running
        return [s for s in running if s.state is decoding and s.num_computed < s.last_position]

    @property
    def _prompts(self) -> bool:
        """Whether there are prompts to compute."""
        running = self._registry.running
        return bool(self._registry.waiting) or any(s.state is State.PREFILLING for s in running)

    def add(self, plan: PlanBuilder) -> None:
        """Adds a row for every sequence of `decoding` to an empty plan."""
        rows, positions = self._with_pages(plan)
        # most steps keep the rows
        if rows != self.last:
            self.last, self._rank = rows, max([s.variant_rank for s in rows], default=0)
            self._paced = any(s.tpot < math.inf for s in rows)
            self._adapted = max([s.place for s in rows], default=0)
            self._numbers, self._slots = [s.number for s in rows], [s.slot for s in rows]
            self._samples = [Sample(i, 0, s.number, s.slot) for i, s in enumerate(rows)]
        plan.rows, plan.rank, plan.paced = rows, self._rank, self._paced
        plan.adapted = max(plan.adapted, self._adapted)
        plan.spans = [*map(Span, self._numbers, self._slots, positions)]
        if self._cohorts.through_host:
            for span, sequence in zip(plan.spans, rows, strict=True):
                span.known = sequence.tokens[span.start]
        plan.samples = [*self._samples]
        plan.sampled = [*rows]
        plan.work = rows_work(positions, self._windows)
        plan.longest = max(positions, default=-1) + 1

    def _with_pages(self, plan: PlanBuilder) -> tuple[list[Sequence], list[int]]:
        """Sequences that decode in this step, and their positions.

        Allocates pages for those that enter a new page, and copies shared pages.
        Preempts the last sequence in the policy's order until there are enough pages. At the latest, this
        ends with one running sequence, for which the pool was found large enough when it was added.
        """
        blocks = self._blocks
        page_size = blocks.page_size
        while True:
            rows = self.decoding()
            positions = [s.num_computed for s in rows]
            growing = [s for s, at in zip(rows, positions, strict=True) if at % page_size == 0]
            copying = [s for s in rows if s in self._sharing] if self._sharing else []
            forked = [s for s in rows if s in self._forked] if self._forked else []
            if not growing and not copying and not forked:
                return rows, positions
            for sequence in growing:
                blocks.pass_windows(sequence.number, sequence.certain)
            wanted = blocks.copies((s.number, s.num_computed) for s in copying)
            wanted.update(blocks.new_pages(len(growing)))
            if blocks.available(wanted):
                break
            self._registry.preempt(victim(self._registry.running))
        for sequence in copying:
            copies, entries = blocks.unshare(sequence.number, sequence.num_computed)
            plan.copies += copies
            if sequence not in self._forked:
                plan.enter(sequence.slot, entries)
            del self._sharing[sequence]
        for sequence in {**dict.fromkeys(growing), **dict.fromkeys(forked)}:
            plan.enter(sequence.slot, blocks.grow(sequence.number, sequence.num_computed + 1))
            self._forked.pop(sequence, None)
        return rows, positions

    def check_integrity(self) -> None:
        """Raises AssertionError if a sequence that does not run is remembered, or another slot of one."""
        assert self.last is None or self._slots == [sequence.slot for sequence in self.last], (
            "a row of another slot"
        )
        assert {*self._sharing, *self._forked} <= {*self._registry.running}, (
            "a sequence that does not run shares a page"
        )
        assert all(sequence.searches for sequence in self._forked), "a sequence that is no beam was forked"


@dataclass(slots=True)
class Collected:
    """New tokens in the plan's order. Lists by field, since objects for each token would cost a large step
    much time.

    Attributes:
        samples: for each token, the index of its sample in the plan.
        sequences: its sequence.
        tokens: its id.
    """

    samples: List[int]
    sequences: list[Sequence]
    tokens: list[int]

    def add(self, sample: int, sequence: Sequence, token: int) -> None:
        assert isinstance(self.samples, list)
        self.samples.append(sample)
        self.sequences.append(sequence)
        self.tokens.append(token)

    def __iter__(self) -> Iterator[tuple[int, Sequence, int]]:
        return zip(self.samples, self.sequences, self.tokens, strict=True)


def by_sample(plan: StepPlan, tokens: Tokens) -> Iterator[tuple[int, Sample, list[int]]]:
    """The tokens that each sequence gets, with the first of its samples and that sample's index."""
    samples, i = plan.samples, 0
    while i < len(samples):
        sampled, span = tokens[i], plan.spans[samples[i].span]
        got = [sampled] if isinstance(sampled, int) else sampled
        if span.guesses:
            for draft in span.following or ():
                if draft != got[-1]:
                    break
                following = tokens[i + len(got)]
                assert isinstance(following, int)
                got.append(following)
        yield i, samples[i], got
        i += 1 + span.guesses


class Timeline:
    """Steps run one after the other, in the order in which they were planned. In a pipeline, each of the
    stages does so, and the steps' seconds are those of one stage.

    Attributes:
        free_at: predicted time at which the first stage has finished the last planned step, corrected
            whenever a step is collected.
    """

    def __init__(self, stages: int = 1) -> None:
        self.free_at = 0.0
        self._behind = stages - 1  # the first stage
        self._ahead: deque[float] = deque()  # seconds of steps that are not collected yet

    def start(self, now: float) -> float:
        """Start time of a step that is planned now."""
        return max(now, self.free_at) if self._ahead else now

    def plan(self, now: float, seconds: float) -> float:
        """Adds a step. Returns its end time."""
        self.free_at = self.start(now) + seconds
        self._ahead.append(seconds)
        return self.free_at + self._behind * seconds

    def collect(self, now: float) -> None:
        """The first step has ended."""
        if self._ahead:
            self._ahead.popleft()
        last = self._behind * self._ahead[-1] if self._ahead else 0.0
        self.free_at = now + max(sum(self._ahead) - last, 0.0)
