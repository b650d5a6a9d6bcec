"""The scheduler: continuous batching with chunked prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from itertools import chain, islice
from types import MappingProxyType

from jengine.scheduling.block_table import GroupPages
from jengine.scheduling.blocks import BlockManager
from jengine.scheduling.bursts import Bursts
from jengine.scheduling.composition import BatchInvariant, Composition
from jengine.scheduling.costs import StepCosts
from jengine.scheduling.draft import Draft
from jengine.scheduling.options import SchedulingOptions
from jengine.scheduling.pending import PendingTiles
from jengine.scheduling.policy import victim
from jengine.scheduling.sequence import Sequence, State
from jengine.scheduling.sequence_limits import SequenceLimits
from jengine.scheduling.step_plan import Sample, Span, StepPlan, Swaps
from jengine.scheduling.strategies import Situation, latency, throughput
from jengine.scheduling.work import Work, rows_work
from jengine.table.pages import SWAPS
from jengine.table.program_table import VARIANTS, ProgramTable
from jengine.updates import ScoredToken

NOTHING_FOUND: Mapping[int, ScoredToken] = MappingProxyType({})
DEFAULTS = SchedulingOptions()


class Scheduler(Bursts):
    """Plans steps, each of which runs one program of the table, and collects the sampled tokens.

    Plans run on the device once each, in the order in which they were made, and are collected in that order. A
    plan may be made before earlier ones are collected. It then assumes that every running sequence gets one
    more token from each earlier plan, or several from a burst. If an earlier token turns out to end the
    sequence, its later rows were wasted and their tokens are dropped. A beam gets no row while its previous one
    is in flight.

    Args:
        page_size: tokens in a page.
        num_pages: number of pages in the cache, the null page included.
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: maximum tokens in a step, decode rows and whole tiles together; at least
            max_num_seqs + one tile.
        max_model_len: maximum tokens of a sequence, prompt and output together.
        groups: the model's cache groups with block tables.
        num_states: number of recurrent states, the null state included; 0: the model has none.
        prefix_caching: whether prompts reuse the pages of earlier ones.
        host_pages: pages of host memory for evicted pages (see HostTier); 0: no host tier.
        staged: maximum number of pages in flight between device and host, in each direction.
        options: order, batching and targets of requests.
        clock: monotonic seconds. Request.arrival uses the same clock. Simulations pass a virtual one.
    """

    def __init__(
        self,
        table: ProgramTable,
        *,
        page_size: int,
        num_pages: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        groups: List[GroupPages] = (GroupPages(),),
        num_states: int = 0,
        prefix_caching: bool = False,
        host_pages: int = 0,
        staged: int = SWAPS,
        options: SchedulingOptions = DEFAULTS,
        costs: StepCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        composition = BatchInvariant(table.tile_size, max_num_batched_tokens) if table.batch_invariant else Composition()
        grid = composition.hit_grid(page_size)
        super().__init__(
            BlockManager(
                page_size,
                [num_pages, num_states] if num_states else [num_pages],
                groups,
                states=num_states > 0,
                prefix_caching=prefix_caching,
                hit_grid=grid,
                host_pages=host_pages,
                staged=staged,
            ),
            SequenceLimits(
                max_model_len=max_model_len,
                page_size=page_size,
                pages=num_pages - 1,
                windows=tuple(group.window for group in groups),
                tile_size=table.tile_size,
                recurrent=num_states > 0,
            ),
            table=table,
            composition=composition,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            costs=StepCosts(table) if costs is None else costs,
            clock=clock,
            options=options,
        )
        self.page_size = page_size
        self._rows: list[Sequence] = []  # of the last step
        self._row_samples: list[Sample] = []  # samples of these rows

    def schedule(self) -> StepPlan | None:
        """Plans the next step. Returns None if there is nothing to do until earlier steps are collected or
        requests added.

        Every decoding sequence gets a row. Tiles of prompts follow: first sequences that have begun, then
        waiting ones. The strategy decides the number of tiles. If rows and tiles may not share a step, the plan
        holds one of the two; see `composition`.
        """
        now, how = self.clock(), self.composition
        self._land()
        self._begin_step(now)
        draft, rows, tiles, longest = Draft(), list[Sequence](), 0, 0
        if how.prompts_first:
            tiles, longest = self._add_tiles(draft, now, self._decoding(), 0)
        if not tiles:
            rows, longest = self._add_rows(draft)
            if not (rows and how.apart):
                tiles, longest = self._add_tiles(draft, now, rows, longest)
        if not draft.spans:
            return None
        how.note(len(rows), tiles)
        steps = self._lengthen(draft, rows, longest) if self.table.steps > 1 and not tiles else 1
        trunk = self.ready.trunk(len(rows), tiles, self._most_pages(longest, steps), len(draft.samples))
        rank = max([sequence.variant_rank for sequence in draft.sampled], default=0)
        sampler = self.ready.sampler(trunk, VARIANTS[rank]) if steps == 1 else self.table.sampler(trunk, VARIANTS[rank])
        for sequence, span in zip(rows, draft.spans, strict=False):
            if self.blocks.states is not None:
                known = min(len(sequence.tokens), sequence.num_computed)
                end = span.start + span.length
                span.states = self.blocks.states.row(span.seq, sequence.tokens, known, end, self.table.tile_size)
            sequence.num_computed += span.length
            sequence.in_flight += span.length
            if span.length > 1 and sequence.has_target:
                sequence.due += (span.length - 1) * sequence.tpot
        if rows and self._repeating:
            self._repeat(draft, rows)
        if rows and self._searching:
            self._suspend_beams(draft, rows)
        plan = StepPlan(
            trunk=trunk,
            sampler=sampler,
            spans=draft.spans,
            samples=draft.samples,
            resets=draft.resets,
            table=draft.table,
            copies=draft.copies,
            work=draft.work,
            steps=steps,
        )
        costs, work = self.costs, draft.work
        seconds = costs.seconds(trunk, sampler, work) if steps == 1 else costs.burst_seconds(plan.burst, work)
        if self.blocks.tier is not None:
            seconds += costs.swap_seconds(*self.blocks.tier.planned)
        plan.seconds = seconds
        self._expect(draft.sampled, len(rows), self._timeline.plan(now, seconds))
        return plan

    def take_swaps(self) -> Swaps | None:
        """Pages to move between device and host before the step that `schedule` has just planned, or None."""
        return None if self.blocks.tier is None else self.blocks.tier.take_swaps() or None

    def swapped(self, saved: List[int], staged: List[int]) -> None:
        """Reports finished swaps: spills into these host pages, fetches into these places."""
        assert self.blocks.tier is not None
        self.blocks.tier.saved(saved)
        self.blocks.tier.landed(staged)

    def collect(
        self, plan: StepPlan, tokens: list[list[int]], found: Mapping[int, ScoredToken] = NOTHING_FOUND
    ) -> list[tuple[int, Sequence, int]]:
        """Collects a step's tokens, given for each of the plan's samples, and finishes sequences that they end.

        Args:
            found: candidates of beams, by index of the sample.

        Returns:
            (sample, sequence, new token), in the plan's order. A token of a sequence that has finished
            meanwhile is dropped. A token of a preempted sequence is kept and recomputed with the others. A beam
            search returns only its last token, when it ends.
        """
        collected = []
        now, by_number, fair, prompts = self.clock(), self._by_number, self._fair, plan.trunk.tiles > 0
        self._timeline.collect(now)
        for i, sample in enumerate(plan.samples):
            sequence = by_number.get(sample.seq)
            if sequence is None:
                continue
            sequence.in_flight -= len(tokens[i])
            known = sequence.tokens
            if prompts and len(known) == sequence.prompt_len:
                self._note_first(sequence, now)
            if fair is not None:
                fair.spend(sequence.client, len(tokens[i]))
            if sequence.searches:
                if (leader := self._search(sequence, found.get(i))) is not None:
                    collected.append((i, leader, leader.tokens[-1]))
                continue
            for token in tokens[i]:
                known.append(token)
                collected.append((i, sequence, token))
                if token in sequence.stop_token_ids:
                    at_eos = token in sequence.eos_token_ids and not sequence.request.params.ignore_eos
                    self.finish(sequence, "stop", None if at_eos else token)
                    break
                if len(known) == sequence.max_len:
                    self.finish(sequence, "length")
                    break
        return collected

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached pages. Returns True: no earlier computation will be reused."""
        self.blocks.reset()
        return True

    def _add_rows(self, draft: Draft) -> tuple[list[Sequence], int]:
        """Adds a row for every decoding sequence. Returns the sequences, and the length of the longest in tokens."""
        rows = self._decode_rows(draft)
        if rows != self._rows:  # most steps keep the rows; a sequence that changes its slot misses a step in between
            self._rows, self._row_samples = rows, [Sample(i, 0, s.number, s.slot) for i, s in enumerate(rows)]
        draft.spans = [Span(s.number, s.slot, s.num_computed) for s in rows]
        draft.samples = [*self._row_samples]
        draft.sampled = [*rows]
        positions = [s.num_computed for s in rows]
        draft.work = Work(*rows_work(positions, self.sequence.windows))
        return rows, max(positions, default=-1) + 1

    def _suspend_beams(self, draft: Draft, rows: list[Sequence]) -> None:
        """Makes rows of beams take their tokens from the host, and holds these beams until their successors are known."""
        for span, sequence in zip(draft.spans, rows, strict=False):
            if sequence.searches:
                span.known, sequence.state = sequence.tokens[span.start], State.HELD

    def _repeat(self, draft: Draft, rows: list[Sequence]) -> None:
        """Rows that recompute tokens after a preemption read known tokens, and sample only after the last of these."""
        for span, sequence in zip(draft.spans, rows, strict=True):
            if sequence in self._repeating:
                span.known = sequence.tokens[span.start]
                if span.start + 1 == len(sequence.tokens):
                    del self._repeating[sequence]
                else:
                    sequence.in_flight -= 1
        left = [i for i, sequence in enumerate(rows) if sequence not in self._repeating]
        draft.samples, draft.sampled = [draft.samples[i] for i in left], [draft.sampled[i] for i in left]

    def _add_tiles(self, draft: Draft, now: float, rows: list[Sequence], longest: int) -> tuple[int, int]:
        """Adds as many prompt tiles as the strategy decides. Returns (tiles, longest with these tiles).

        Args:
            rows: decode rows of the step or, if it has none, those that wait for it.
            longest: length in tokens of the longest sequence in the plan so far.
        """
        self._admitting = self._admissible()
        begun = [s for s in self._running if s.state is State.PREFILLING] if len(rows) < len(self._running) else []
        pending = self._pending(begun, (self.max_num_batched_tokens - len(rows)) // self.table.tile_size)
        if not pending.count:
            return 0, longest
        before = len(draft.spans)
        work = draft.work if before else Work(*rows_work([s.num_computed for s in rows], self.sequence.windows))
        tiles = self._prefill(draft, begun, self._decide(now, rows, work, max(longest, pending.longest), pending))
        return tiles, max([longest, *[span.start + span.length for span in draft.spans[before:]]])

    def _decoding(self) -> list[Sequence]:
        """Running sequences that need a row. A sequence whose last token is in flight finishes when that is collected."""
        decoding = State.DECODING
        return [s for s in self._running if s.state is decoding and s.num_computed < s.last_position]

    def _decode_rows(self, draft: Draft) -> list[Sequence]:
        """Sequences that decode in this step. Allocates pages for those that enter a new page, and copies shared pages.

        Preempts the last sequence in the policy's order until there are enough pages. At the latest, this ends
        with one running sequence, for which the pool was found large enough when it was added.
        """
        page_size, blocks = self.page_size, self.blocks
        while True:
            rows = self._decoding()
            growing = [s for s in rows if s.num_computed % page_size == 0]
            copying = [s for s in rows if s in self._sharing] if self._sharing else []
            forked = [s for s in rows if s in self._forked] if self._forked else []
            if not growing and not copying and not forked:
                return rows
            for sequence in growing:
                blocks.pass_windows(sequence.number, sequence.num_computed)
            wanted = blocks.copies((s.number, s.num_computed) for s in copying)
            wanted.update(blocks.new_pages(len(growing)))
            if blocks.available(wanted):
                break
            self._preempt(victim(self._running))
        for sequence in copying:
            copies, entries = blocks.unshare(sequence.number, sequence.num_computed)
            draft.copies += copies
            if sequence not in self._forked:
                draft.enter(sequence.slot, entries)
            del self._sharing[sequence]
        for sequence in {**dict.fromkeys(growing), **dict.fromkeys(forked)}:
            draft.enter(sequence.slot, blocks.grow(sequence.number, sequence.num_computed + 1))
            self._forked.pop(sequence, None)
        return rows

    def _decide(self, now: float, rows: list[Sequence], work: Work, tokens: int, pending: PendingTiles) -> int:
        """Number of pending tiles to run beside the decode rows, as the strategy decides.

        Args:
            work: work of the rows.
            tokens: length of the longest sequence.
        """
        rank = max([s.variant_rank for s in chain(self._running, islice(self._waiting, max(self._admitting, 0)))])

        def seconds(rows: int, tiles: int) -> float:
            return self._seconds(rows, tiles, work._replace(attended=pending.attended(tiles)), tokens, rank)

        outlook = self._outlook(self._timeline.start(now), rows) if self.strategy == "latency" else None
        situation = Situation(len(rows), pending.count, self.table.tile_size, self.ready.tile_buckets, seconds, outlook)
        self.decision = throughput(situation) if outlook is None else latency(situation)
        self.decisions[f"{self.strategy}: {self.decision.reason}"] += 1
        return self.decision.tiles
