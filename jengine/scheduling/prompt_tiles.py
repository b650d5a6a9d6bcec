"""Prompts: looked up in the prefix cache, admitted, and cut into tiles."""

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
        composition: rules for cutting prompts.
        others: see Admissions.
    """

    def __init__(
        self, blocks: BlockManager, sequence: SequenceLimits, *, table: ProgramTable, composition: Composition, **others: Any
    ) -> None:
        self.composition = composition
        super().__init__(blocks, sequence, ready=ReadyPrograms(table), **others)
        self.table = table
        self.prefix_queries = self.prefix_hits = 0  # prompt tokens looked up in the prefix cache, and found
        # The rest: tokens looked up on the host, fetched from it, and recomputed because that is faster than fetching.
        self.host_queries = self.host_hits = self.host_declined = 0
        self.resumptions = 0, 0, 0  # counts for preempted sequences; see Load.resumptions
        self._admitting = 0  # number of waiting sequences that the strategy allows to run in this step
        self._last_match = (-1, 0), NO_HIT  # (sequence, index version), result

    def _pending(self, begun: list[Sequence], limit: int) -> PendingTiles:
        """Prompt tiles that can be computed now, at most `limit`."""
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
        """Whether any sequence is waiting for pages from the host."""
        return self.blocks.tier is not None and self.blocks.tier.fetching

    def _land(self) -> None:
        """Resumes sequences whose pages have arrived from the host."""
        for number in self.blocks.land():
            sequence = self._by_number[number]
            sequence.state = State.PREFILLING
            self._arrived[sequence] = None

    def _prefill(self, draft: Draft, begun: list[Sequence], budget: int) -> int:
        """Cuts prompts into a plan with at most `budget` tiles. Returns the number of tiles used.

        Each prompt is planned to its end before the next one. So if several prompts have a common prefix, the
        first computes it and the others find it.
        """
        left = budget
        for sequence in begun:
            left -= self._cut(draft, sequence, left)
        while left > 0 and self._admitting > 0 and all(s.state is not State.PREFILLING for s in self._running):
            first = self._waiting.first
            # A preempted sequence with tokens in flight is not fully known yet; those behind it wait.
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
        """Number of further sequences that can run, limited by free slots and by the rows of ready programs."""
        return min(len(self._free_slots), self.ready.max_rows - len(self._running))

    def _match(self, sequence: Sequence) -> Hit:
        """Looks up a sequence in the prefix cache.

        A request for prompt log probabilities, or for the mean of hidden states, must compute its whole prompt.
        """
        request = sequence.request
        if request.params.prompt_logprobs is not None or (request.pooling is not None and request.pooling.needs_all):
            return NO_HIT
        question = sequence.number, self.blocks.version
        if self._last_match[0] != question:  # the first waiting sequence is looked up in every step
            tokens, count, salt = sequence.tokens, self.composition.prefilled(sequence), sequence.request.cache_salt
            tokens = tokens[:count] if count < len(tokens) else tokens
            hit = self.blocks.match(tokens, salt)
            self._last_match = question, self._or_fetch(hit, self.blocks.match_both(tokens, salt, hit), count)
        return self._last_match[1]

    def _or_fetch(self, hit: Hit, longer: Hit, count: int) -> Hit:
        """Returns the longer hit if fetching its pages is predicted to be faster than computing them, otherwise `hit`.

        Args:
            count: length of the prompt in tokens.
        """
        if not longer.fetches:
            return hit
        saved = self._compute_seconds(hit.tokens, count) - self._compute_seconds(longer.tokens, count)
        return longer if self.costs.fetch_seconds(longer.fetches) < saved else hit._replace(from_host=longer.from_host)

    def _compute_seconds(self, start: int, end: int) -> float:
        """Predicted seconds to compute a prompt's tokens at [start, end) alone."""
        work = Work(attended=pairs(start, end - start, self.sequence.windows))
        return self._prefill_seconds(end - start) + self.costs.work_seconds(work)

    def _needed(self, sequence: Sequence, hit: Hit) -> Counter[int]:
        """Pages needed from each pool to admit a sequence: those of all its known tokens, so a prefill does not
        stop half-way.

        For a beam search, includes the next pages of its beams.
        """
        needed, prompt, beams = self.blocks.needed(hit, len(sequence.tokens), self.table.tile_size), sequence.prompt_len, sequence.slots
        if beams > 1:
            shared, last = prompt // self.blocks.page_size, min(prompt + 1, sequence.max_len - 1)
            more = beams * (self.blocks.pages_of(last) - shared) - (self.blocks.pages_of(prompt) - shared)
            needed.update(self.blocks.new_pages(more))
        return needed

    def _fits(self, wanted: Counter[int], running: int) -> bool:
        """Whether these pages are available and one more for each running sequence, to avoid an early preemption."""
        return self.blocks.available(wanted + self.blocks.new_pages(running))

    def _note_hit(self, sequence: Sequence, tokens: int, hit: Hit = NO_HIT) -> None:
        """Records that `tokens` tokens of a sequence are not computed. hit: the cache hit, which may include host pages."""
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
        """Records how a preempted sequence resumes: its pages were still cached, come from the host, or are recomputed."""
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
        """Plans up to `tiles` tiles of a sequence's known tokens, if there are pages for them. Returns the
        number of tiles."""
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
        """Plans a sample after the last span of a sequence whose known tokens are all planned."""
        draft.samples.append(Sample(len(draft.spans) - 1, draft.spans[-1].length - 1, sequence.number, sequence.slot))
        draft.sampled.append(sequence)
        sequence.state = State.HELD if sequence.searches else State.DECODING
        sequence.in_flight += 1

    def _fork(self, draft: Draft, parent: Sequence) -> None:
        """Forks the prompt's other samples, which wait behind the first one. They share the tokens that it has computed."""
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
    """The prompt tokens that follow positions [start, end), if their log probabilities were requested."""
    request = sequence.request
    if request.params.prompt_logprobs is None:
        return None
    return request.prompt_token_ids[start + 1 : end + 1] or None


def _pooled(sequence: Sequence, start: int, end: int) -> int | None:
    """Offset in [start, end) from which hidden states are summed for an embedding; None: none are summed."""
    pooling = sequence.request.pooling
    if pooling is None:
        return None
    first = 0 if pooling.needs_all else sequence.prompt_len - 1
    return max(first - start, 0) if first < end else None
