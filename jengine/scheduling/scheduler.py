"""Which sequences run next: continuous batching with prompts prefilled in chunks beside decode rows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as List
from itertools import chain, islice

from jengine.program_table import VARIANTS, ProgramTable
from jengine.ready_programs import ReadyPrograms
from jengine.scheduling.admissions import Admissions
from jengine.scheduling.block_table import NO_HIT, GroupPages, Hit
from jengine.scheduling.blocks import BlockManager
from jengine.scheduling.composition import BatchInvariant, Composition
from jengine.scheduling.costs import StepCosts
from jengine.scheduling.draft import Draft
from jengine.scheduling.options import SchedulingOptions
from jengine.scheduling.pending import PendingTiles
from jengine.scheduling.policy import victim
from jengine.scheduling.sequence import Sequence, State
from jengine.scheduling.sequence_limits import SequenceLimits
from jengine.scheduling.step_plan import Sample, SlotReset, Span, StepPlan
from jengine.scheduling.strategies import Situation, latency, throughput
from jengine.scheduling.work import Work, pairs, rows_work

DEFAULTS = SchedulingOptions()


class Scheduler(Admissions):
    """Plans steps, one program of the table each, and takes in the tokens they sampled.

    Plans run on the device in the order in which they were made, each once, and each is collected once, in that order.
    A plan may be made before earlier ones are collected: every running sequence is then taken to get one more token from
    each. Where one of these turns out to end the sequence, rows planned after it were in vain, and what they sample is dropped.

    Args:
        page_size: tokens a page holds.
        num_pages: of the cache, the null page included.
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: of one step, decode rows and whole tiles together; at least max_num_seqs + one tile.
        max_model_len: tokens of a sequence, prompt and output together.
        groups: the model's cache groups.
        prefix_caching: whether prompts reuse the pages of earlier ones.
        options: how requests are ordered, batched and promised.
        clock: seconds, monotonic; Request.arrival is by the same clock. A simulation brings a virtual one.
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
        prefix_caching: bool = False,
        options: SchedulingOptions = DEFAULTS,
        costs: StepCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.composition = BatchInvariant(table.tile_size, max_num_batched_tokens) if table.batch_invariant else Composition()
        grid = self.composition.hit_grid(page_size)
        super().__init__(
            BlockManager(page_size, [num_pages], groups, prefix_caching=prefix_caching, hit_grid=grid),
            SequenceLimits(
                max_model_len=max_model_len,
                page_size=page_size,
                pages=num_pages - 1,
                windows=tuple(group.window for group in groups),
                tile_size=table.tile_size,
            ),
            ready=ReadyPrograms(table),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            costs=StepCosts(table) if costs is None else costs,
            clock=clock,
            options=options,
        )
        self.table = table
        self.page_size = page_size
        self.prefix_queries = self.prefix_hits = 0  # prompt tokens looked up, and found
        self._admitting = 0  # waiting sequences that the strategy lets run in this step
        self._rows: list[Sequence] = []  # of the last step
        self._row_samples: list[Sample] = []  # theirs
        self._last_match = (-1, 0), NO_HIT  # (sequence, version of the index), what was found

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do before earlier steps are collected or requests added.

        Every decoding sequence gets a row. Prompts follow, in tiles: first of sequences that have begun,
        then of those waiting. How many tiles is the strategy's decision. Where rows and tiles may not share a step, it has one of them:
        see `composition`.
        """
        now, how = self.clock(), self.composition
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
        trunk = self.ready.trunk(len(rows), tiles, self.blocks.pages_of(longest), len(draft.samples))
        rank = max([sequence.variant_rank for sequence in draft.sampled], default=0)
        sampler = self.ready.sampler(trunk, VARIANTS[rank])
        for sequence in rows:
            sequence.num_computed += 1
            sequence.in_flight += 1
        if rows and self._repeating:
            self._repeat(draft, rows)
        self._expect(draft.sampled, len(rows), self._timeline.plan(now, self.costs.seconds(trunk, sampler, draft.work)))
        return StepPlan(
            trunk=trunk,
            sampler=sampler,
            spans=draft.spans,
            samples=draft.samples,
            resets=draft.resets,
            table=draft.table,
            copies=draft.copies,
            work=draft.work,
        )

    def collect(self, plan: StepPlan, tokens: list[list[int]]) -> list[tuple[int, Sequence, int]]:
        """Takes in a step's tokens, those of each of the plan's samples, and finishes the sequences that they end.

        Returns (sample, sequence, new token), in the plan's order. A token of a sequence that has finished
        meanwhile is dropped; that of a preempted one is kept and recomputed with the others.
        """
        collected = []
        now, by_number, fair, prompts = self.clock(), self._by_number, self._fair, plan.trunk.tiles > 0
        self._timeline.collect(now)
        for i, sample in enumerate(plan.samples):
            sequence = by_number.get(sample.seq)
            if sequence is None:
                continue
            sequence.in_flight -= 1
            known = sequence.tokens
            if prompts and len(known) == sequence.prompt_len:
                self._note_first(sequence, now)
            if fair is not None:
                fair.spend(sequence.client, len(tokens[i]))
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
        """Forgets all cached pages. True: nothing that was computed before will be reused."""
        self.blocks.reset()
        return True

    def _add_rows(self, draft: Draft) -> tuple[list[Sequence], int]:
        """A row for every decoding sequence. Returns these, and how many tokens the longest of them has."""
        rows = self._decode_rows(draft)
        if rows != self._rows:  # most steps have the rows of the one before; one that gets another slot is no row in between
            self._rows, self._row_samples = rows, [Sample(i, 0, s.number, s.slot) for i, s in enumerate(rows)]
        draft.spans = [Span(s.number, s.slot, s.num_computed) for s in rows]
        draft.samples = [*self._row_samples]
        draft.sampled = [*rows]
        positions = [s.num_computed for s in rows]
        draft.work = Work(*rows_work(positions, self.sequence.windows))
        return rows, max(positions, default=-1) + 1

    def _repeat(self, draft: Draft, rows: list[Sequence]) -> None:
        """Rows that compute again what was generated before a preemption take known tokens, and sample nothing before the last of them."""
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
        """Prompts beside the rows, in as many tiles as the strategy decides.

        Args:
            rows: those of the step, or, in a step without any, those that wait for it.
            longest: tokens of the longest sequence in the plan so far.

        Returns:
            How many tiles; and `longest`, with them.
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
        """Running sequences that need a row. One whose last token is in flight needs none, and finishes when that is collected."""
        decoding = State.DECODING
        return [s for s in self._running if s.state is decoding and s.num_computed < s.last_position]

    def _decode_rows(self, draft: Draft) -> list[Sequence]:
        """Sequences that decode in this step. Those that enter a new page get it, those whose page is shared a copy.

        Preempts, the policy's last first, until there are pages enough. That ends, at the latest, with one
        sequence running, for which alone the pool was found large enough when it was added.
        """
        page_size, blocks = self.page_size, self.blocks
        while True:
            rows = self._decoding()
            growing = [s for s in rows if s.num_computed % page_size == 0]
            copying = [s for s in rows if s in self._sharing] if self._sharing else []
            if not growing and not copying:
                return rows
            for sequence in growing:
                blocks.pass_windows(sequence.number, sequence.num_computed)
            wanted = blocks.copies((s.number, s.num_computed) for s in copying)
            wanted.update(blocks.new_pages(len(growing)))
            if blocks.available(wanted):
                break
            self._preempt(victim(self._running))
        for sequence in growing:
            draft.enter(sequence.slot, blocks.grow(sequence.number, sequence.num_computed + 1))
        for sequence in copying:
            copies, entries = blocks.unshare(sequence.number, sequence.num_computed)
            draft.copies += copies
            draft.enter(sequence.slot, entries)
            del self._sharing[sequence]
        return rows

    def _pending(self, begun: list[Sequence], limit: int) -> PendingTiles:
        """Prompt tiles that can be worked on now, `limit` at most."""
        limit, pending = min(limit, self.ready.max_tiles), PendingTiles(self.table.tile_size, self.sequence.windows)
        for sequence in begun:
            pending.add(sequence.num_computed, self.composition.prefilled(sequence), limit)
        slots, taken, running = self._room, Counter[int](), len(self._running)
        for sequence in self._waiting:
            if pending.count >= limit or slots <= 0 or sequence.in_flight:
                break
            hit = self._match(sequence)
            taken.update(self._needed(sequence, hit))
            if not self._fits(taken, running):
                break
            pending.add(hit.tokens, self.composition.prefilled(sequence), limit)
            slots, running = slots - 1, running + 1
        return pending

    def _prefill(self, draft: Draft, begun: list[Sequence], budget: int) -> int:
        """Cuts prompts into a plan, `budget` tiles at most: each to its end before the next one's turn. Returns how many tiles.

        So where several prompts begin alike, the first computes what the others then find.
        """
        left = budget
        for sequence in begun:
            left -= self._cut(draft, sequence, left)
        while left > 0 and self._room > 0 and all(s.state is not State.PREFILLING for s in self._running):
            first = self._waiting.first
            # A preempted sequence with tokens in flight is not known in full yet; those behind it wait.
            if first is None or first.in_flight:
                break
            hit = self._match(first)
            if not self._fits(self._needed(first, hit), len(self._running)):
                break
            self._admit(draft, first)
            self.blocks.admit(first.number, hit, self.composition.prefilled(first), first.request.cache_salt)
            first.state, first.num_computed = State.PREFILLING, hit.tokens
            self._note_hit(first, hit.tokens)
            left -= self._cut(draft, first, left)
        return budget - left

    def _decide(self, now: float, rows: list[Sequence], work: Work, tokens: int, pending: PendingTiles) -> int:
        """How many of the pending tiles to run beside the decode rows, by the strategy.

        Args:
            work: of the rows.
            tokens: of the longest sequence.
        """
        rank = max([s.variant_rank for s in chain(self._running, islice(self._waiting, max(self._admitting, 0)))])

        def seconds(rows: int, tiles: int) -> float:
            return self._seconds(rows, tiles, work._replace(attended=pending.attended(tiles)), tokens, rank)

        outlook = self._outlook(self._timeline.start(now), rows) if self.strategy == "latency" else None
        situation = Situation(len(rows), pending.count, self.table.tile_size, self.ready.tile_buckets, seconds, outlook)
        self.decision = throughput(situation) if outlook is None else latency(situation)
        self.decisions[f"{self.strategy}: {self.decision.reason}"] += 1
        return self.decision.tiles

    @property
    def _room(self) -> int:
        """How many more sequences may run in this step: they need slots, and rows of a program that is ready."""
        return min(len(self._free_slots), self.ready.max_rows - len(self._running), self._admitting)

    def _match(self, sequence: Sequence) -> Hit:
        """What of it is in the cache. Log probabilities of a prompt, and the mean of its hidden states, need all of it to be computed."""
        request = sequence.request
        if request.params.prompt_logprobs is not None or (request.pooling is not None and request.pooling.needs_all):
            return NO_HIT
        question = sequence.number, self.blocks.version
        if self._last_match[0] != question:  # the first of those waiting is looked up in each step
            tokens, count = sequence.tokens, self.composition.prefilled(sequence)
            self._last_match = question, self.blocks.match(tokens[:count] if count < len(tokens) else tokens, sequence.request.cache_salt)
        return self._last_match[1]

    def _needed(self, sequence: Sequence, hit: Hit) -> Counter[int]:
        """Pages by pool that admitting a sequence takes: those of its known tokens, so that a prefill does not stop half-way."""
        return self.blocks.needed(hit, len(sequence.tokens), self.table.tile_size)

    def _fits(self, wanted: Counter[int], running: int) -> bool:
        """Whether there are these pages, and one for each running sequence, so that none is soon preempted."""
        return self.blocks.available(wanted + self.blocks.new_pages(running))

    def _note_hit(self, sequence: Sequence, tokens: int) -> None:
        if self.blocks.prefix_caching:
            self.prefix_queries += self.composition.prefilled(sequence)
            self.prefix_hits += tokens
        if not sequence.scheduled:
            sequence.scheduled, sequence.num_cached = self.clock(), tokens

    def _admit(self, draft: Draft, sequence: Sequence) -> None:
        self._take_slot(sequence)
        self._admitting -= 1
        draft.resets.append(
            SlotReset(
                slot=sequence.slot,
                params=sequence.request.params,
                seed=sequence.seed,
                sample_index=sequence.request.sample_index,
                prompt_len=sequence.prompt_len,
                stop_token_ids=sequence.suppressed_token_ids,
                counted=list(sequence.tokens) if sequence.request.params.penalizes else None,
            )
        )

    def _cut(self, draft: Draft, sequence: Sequence, tiles: int) -> int:
        """Plans up to `tiles` tiles of a sequence's known tokens, as far as there are pages for them. Returns how many."""
        number, start, blocks = sequence.number, sequence.num_computed, self.blocks
        last = self.composition.prefilled(sequence)
        blocks.pass_windows(number, start)
        end = self.composition.end(blocks.room(number, min(start + tiles * self.table.tile_size, last)), last)
        if end <= start:
            return 0
        draft.enter(sequence.slot, blocks.grow(number, end))
        wanted = _targets(sequence, start, end), _pooled(sequence, start, end)
        draft.spans.append(Span(number, sequence.slot, start, end - start, sequence.tokens[start:end], *wanted))
        draft.work = draft.work._replace(attended=draft.work.attended + pairs(start, end - start, self.sequence.windows))
        sequence.num_computed = end
        blocks.commit(number, sequence.tokens, end)
        if end == len(sequence.tokens):
            self._sample(draft, sequence)
            if end == sequence.prompt_len:
                self._fork(draft, sequence)
        elif end == last:
            sequence.state = State.DECODING
            self._repeating[sequence] = None
        return -(-(end - start) // self.table.tile_size)

    def _sample(self, draft: Draft, sequence: Sequence) -> None:
        """A sequence, of which all known tokens are planned, gets the token after the last span."""
        draft.samples.append(Sample(len(draft.spans) - 1, draft.spans[-1].length - 1, sequence.number, sequence.slot))
        draft.sampled.append(sequence)
        sequence.state = State.DECODING
        sequence.in_flight += 1

    def _fork(self, draft: Draft, parent: Sequence) -> None:
        """Prompt's other samples, which wait behind the first one, share what it has computed."""
        blocks, partial = self.blocks, parent.prompt_len % self.page_size > 0
        while self._room > 0 and self._fits(Counter(), len(self._running) + 1):
            child = self._waiting.first
            if child is None or child.family != parent.family or child.in_flight or len(child.tokens) > child.prompt_len:
                return
            self._admit(draft, child)
            blocks.fork(parent.number, child.number)
            draft.enter(child.slot, blocks.grow(child.number, child.prompt_len))
            child.num_computed = child.prompt_len
            self._note_hit(child, child.prompt_len)
            self._sample(draft, child)
            if partial:
                self._sharing[parent] = self._sharing[child] = None


def _targets(sequence: Sequence, start: int, end: int) -> list[int] | None:
    """The prompt's tokens that follow positions [start, end), where their log probabilities are asked for."""
    request = sequence.request
    if request.params.prompt_logprobs is None:
        return None
    return request.prompt_token_ids[start + 1 : end + 1] or None


def _pooled(sequence: Sequence, start: int, end: int) -> int | None:
    """From which of the tokens at [start, end) on hidden states are summed, for an embedding."""
    pooling = sequence.request.pooling
    if pooling is None:
        return None
    first = 0 if pooling.needs_all else sequence.prompt_len - 1
    return max(first - start, 0) if first < end else None
