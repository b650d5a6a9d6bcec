"""Prompts on their way into steps: found in the cache, admitted, cut into tiles."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jengine.beams import sampling_of
from jengine.scheduling.admissions import Admissions
from jengine.scheduling.block_table import NO_HIT, Hit
from jengine.scheduling.blocks import BlockManager
from jengine.scheduling.composition import Composition
from jengine.scheduling.draft import Draft
from jengine.scheduling.pending import PendingTiles
from jengine.scheduling.sequence import Sequence, State
from jengine.scheduling.sequence_limits import SequenceLimits
from jengine.scheduling.step_plan import Sample, SlotReset, Span
from jengine.scheduling.work import Work, pairs
from jengine.table.program_table import ProgramTable
from jengine.table.ready_programs import ReadyPrograms


class PromptTiles(Admissions):
    """Sequences, and the tiles of their prompts.

    Args:
        composition: where prompts may be cut.
        others: of Admissions.
    """

    def __init__(
        self, blocks: BlockManager, sequence: SequenceLimits, *, table: ProgramTable, composition: Composition, **others: Any
    ) -> None:
        self.composition = composition
        super().__init__(blocks, sequence, ready=ReadyPrograms(table), **others)
        self.table = table
        self.prefix_queries = self.prefix_hits = 0  # prompt tokens looked up, and found
        # Of the others, those looked up on the host, those fetched from there, and those computed again because that takes less.
        self.host_queries = self.host_hits = self.host_declined = 0
        self.resumptions = 0, 0, 0  # of preempted sequences, see Load.resumptions
        self._admitting = 0  # waiting sequences that the strategy lets run in this step
        self._last_match = (-1, 0), NO_HIT  # (sequence, version of the index), what was found

    def _pending(self, begun: list[Sequence], limit: int) -> PendingTiles:
        """Prompt tiles that can be worked on now, `limit` at most."""
        limit, pending = min(limit, self.ready.max_tiles), PendingTiles(self.table.tile_size, self.sequence.windows)
        for sequence in begun:
            pending.add(sequence.num_computed, self.composition.prefilled(sequence), limit)
        admitting, room, taken, running = self._admitting, self._room, Counter[int](), len(self._running)
        for sequence in self._waiting:
            if pending.count >= limit or admitting <= 0 or room < sequence.slots or sequence.in_flight:
                break
            hit = self._match(sequence)
            taken.update(self._needed(sequence, hit))
            if not self._fits(taken, running):
                break
            pending.add(hit.tokens, self.composition.prefilled(sequence), limit)
            admitting, room, running = admitting - 1, room - sequence.slots, running + sequence.slots
        return pending

    @property
    def fetching(self) -> bool:
        """Whether a sequence waits for pages from the host."""
        return self.blocks.tier is not None and self.blocks.tier.fetching

    def _land(self) -> None:
        """Sequences go on whose pages have come from the host."""
        for number in self.blocks.land():
            sequence = self._by_number[number]
            sequence.state = State.PREFILLING
            self._arrived[sequence] = None

    def _prefill(self, draft: Draft, begun: list[Sequence], budget: int) -> int:
        """Cuts prompts into a plan, `budget` tiles at most: each to its end before the next one's turn. Returns how many tiles.

        So where several prompts begin alike, the first computes what the others then find.
        """
        left = budget
        for sequence in begun:
            left -= self._cut(draft, sequence, left)
        while left > 0 and self._admitting > 0 and all(s.state is not State.PREFILLING for s in self._running):
            first = self._waiting.first
            # A preempted sequence with tokens in flight is not known in full yet; those behind it wait.
            if first is None or first.in_flight or first.slots > self._room:
                break
            hit = self._match(first)
            if self.blocks.coming(hit) or not self._fits(self._needed(first, hit), len(self._running)):
                break
            self._take_slots(first)
            self.blocks.admit(first.number, hit, self.composition.prefilled(first), first.request.cache_salt, first.tokens)
            first.num_computed = hit.tokens
            self._note_hit(first, hit.tokens, hit)
            if first.num_preemptions:
                self._note_resumption(first, hit)
            if hit.fetches:
                first.state = State.FETCHING
                continue
            first.state = State.PREFILLING
            self._set_slots(draft, first)
            left -= self._cut(draft, first, left)
        return budget - left

    @property
    def _room(self) -> int:
        """How many more sequences there is room for: they need slots, and rows of a program that is ready."""
        return min(len(self._free_slots), self.ready.max_rows - len(self._running))

    def _match(self, sequence: Sequence) -> Hit:
        """What of it is in the cache. Log probabilities of a prompt, and the mean of its hidden states, need all of it to be computed."""
        request = sequence.request
        if request.params.prompt_logprobs is not None or (request.pooling is not None and request.pooling.needs_all):
            return NO_HIT
        question = sequence.number, self.blocks.version
        if self._last_match[0] != question:  # the first of those waiting is looked up in each step
            tokens, count, salt = sequence.tokens, self.composition.prefilled(sequence), sequence.request.cache_salt
            tokens = tokens[:count] if count < len(tokens) else tokens
            hit = self.blocks.match(tokens, salt)
            self._last_match = question, self._or_fetch(hit, self.blocks.match_both(tokens, salt, hit), count)
        return self._last_match[1]

    def _or_fetch(self, hit: Hit, longer: Hit, count: int) -> Hit:
        """The longer hit, whose pages have to be fetched, if that is predicted to take less than computing what they hold.

        Args:
            count: tokens of the prompt.
        """
        if not longer.fetches:
            return hit
        saved = self._compute_seconds(hit.tokens, count) - self._compute_seconds(longer.tokens, count)
        return longer if self.costs.fetch_seconds(longer.fetches) < saved else hit._replace(from_host=longer.from_host)

    def _compute_seconds(self, start: int, end: int) -> float:
        """What a prompt's tokens at [start, end) take alone."""
        work = Work(attended=pairs(start, end - start, self.sequence.windows))
        return self._prefill_seconds(end - start) + self.costs.work_seconds(work)

    def _needed(self, sequence: Sequence, hit: Hit) -> Counter[int]:
        """Pages by pool that admitting a sequence takes: those of its known tokens, so that a prefill does not stop half-way. Of
        a beam search also those that its beams take next."""
        needed, prompt, beams = self.blocks.needed(hit, len(sequence.tokens), self.table.tile_size), sequence.prompt_len, sequence.slots
        if beams > 1:
            shared, last = prompt // self.blocks.page_size, min(prompt + 1, sequence.max_len - 1)
            more = beams * (self.blocks.pages_of(last) - shared) - (self.blocks.pages_of(prompt) - shared)
            needed.update(self.blocks.new_pages(more))
        return needed

    def _fits(self, wanted: Counter[int], running: int) -> bool:
        """Whether there are these pages, and one for each running sequence, so that none is soon preempted."""
        return self.blocks.available(wanted + self.blocks.new_pages(running))

    def _note_hit(self, sequence: Sequence, tokens: int, hit: Hit = NO_HIT) -> None:
        """So many of its tokens are not computed. hit: what was found, where the host may have had a part in it."""
        if self.blocks.prefix_caching:
            queries, fetched = self.composition.prefilled(sequence), hit.from_host if hit.fetches else 0
            self.prefix_queries += queries
            self.prefix_hits += tokens - fetched
            if self.blocks.tier is not None:
                self.host_queries += queries - (tokens - fetched)
                self.host_hits += fetched
                self.host_declined += hit.from_host - fetched
        if not sequence.scheduled:
            sequence.scheduled, sequence.num_cached = self.clock(), tokens

    def _note_resumption(self, sequence: Sequence, hit: Hit) -> None:
        """A preempted sequence runs again: its pages were still there, came from the host, or are computed again."""
        missing = self.composition.prefilled(sequence) - hit.tokens
        cached, swapped, recomputed = self.resumptions
        if hit.fetches:
            swapped += 1
        elif missing <= self.composition.hit_grid(self.blocks.page_size):
            cached += 1
        else:
            recomputed += 1
        self.resumptions = cached, swapped, recomputed

    def _take_slots(self, sequence: Sequence) -> list[Sequence]:
        self._admitting -= 1
        return super()._take_slots(sequence)

    def _set_slots(self, draft: Draft, sequence: Sequence) -> None:
        request, beams = sequence.request, sequence.request.beams
        members = [sequence] if sequence.beams is None else sequence.beams.members
        for index, member in enumerate(members, request.sample_index):
            draft.resets.append(
                SlotReset(
                    slot=member.slot,
                    params=request.params if beams is None else sampling_of(beams, logprobs=2 * beams.beam_width),
                    seed=sequence.seed,
                    sample_index=index,
                    prompt_len=sequence.prompt_len,
                    stop_token_ids=sequence.suppressed_token_ids,
                    counted=list(sequence.tokens) if request.params.penalizes else None,
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
        if sequence in self._arrived:
            del self._arrived[sequence]
            self._set_slots(draft, sequence)
        draft.enter(sequence.slot, blocks.grow(number, end))
        wanted = _targets(sequence, start, end), _pooled(sequence, start, end)
        states = None if blocks.states is None else blocks.states.tiles(number, start, end, self.table.tile_size, last)
        draft.spans.append(Span(number, sequence.slot, start, end - start, sequence.tokens[start:end], *wanted, states=states))
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
        sequence.state = State.HELD if sequence.searches else State.DECODING
        sequence.in_flight += 1

    def _fork(self, draft: Draft, parent: Sequence) -> None:
        """Prompt's other samples, which wait behind the first one, share what it has computed."""
        blocks, partial = self.blocks, parent.prompt_len % self.blocks.page_size > 0
        while min(self._room, self._admitting) > 0 and self._fits(blocks.forked, len(self._running) + 1):
            child = self._waiting.first
            if child is None or child.family != parent.family or child.in_flight or len(child.tokens) > child.prompt_len:
                return
            self._take_slots(child)
            self._set_slots(draft, child)
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
