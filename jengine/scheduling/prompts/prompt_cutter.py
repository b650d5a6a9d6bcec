"""Prompts are admitted, cut into tiles and forked into samples."""

from __future__ import annotations

from collections import Counter

from jengine.core.beam_outputs import sampling_of
from jengine.scheduling.costs.predictor import StepPredictor
from jengine.scheduling.pages.block_table import Hit, ahead, meets, next_range
from jengine.scheduling.prompts.prefix_lookup import PendingTiles, PrefixLookup
from jengine.scheduling.requests.registry import Registry
from jengine.scheduling.requests.sequence import Sequence, State
from jengine.scheduling.rows import PlanBuilder, Rows
from jengine.scheduling.rules.beam_searches import BeamSearches
from jengine.scheduling.rules.repeats import Repeats
from jengine.scheduling.step_plan import Sample, SlotReset, Span, Work, pairs


class PromptCutter:
    """
    Attributes:
        admitting: number of waiting sequences that may still be admitted in this step.
    """

    def __init__(
        self,
        registry: Registry,
        predictor: StepPredictor,
        prefixes: PrefixLookup,
        rows: Rows,
        searches: BeamSearches,
        repeats: Repeats,
    ) -> None:
        self._registry, self._blocks, self._limits = registry, registry.blocks, registry.limits
        self._composition, self._predictor, self._prefixes = registry.composition, predictor, prefixes
        self._rows, self._searches, self._repeats = rows, searches, repeats
        self._tile_size = registry.limits.tile_size
        self.admitting = 0
        # running; their pages have arrived, but their slots are not set yet
        self._landed: dict[Sequence, None] = {}

    def forget(self, sequence: Sequence) -> None:
        self._landed.pop(sequence, None)

    def land(self) -> None:
        """Resumes sequences whose pages have arrived from the host."""
        for number in self._blocks.land():
            sequence = self._registry.by_number[number]
            sequence.state = State.PREFILLING
            self._landed[sequence] = None

    def prepare_images(self) -> None:
        """Decides which waiting sequences may start with their images, and what to encode before the step."""
        registry = self._registry
        registry.images.prepare(
            registry.waiting,
            lambda sequence: self._prefixes.match(sequence).tokens,
            self._predictor.ready.encoders,
            briefly=any(s.state is State.DECODING for s in registry.running),
        )

    def begun(self) -> list[Sequence]:
        """Running sequences whose prompts are not computed to the end."""
        return [s for s in self._registry.running if s.state is State.PREFILLING]

    def pending(self, begun: list[Sequence], limit: int) -> PendingTiles:
        """Prompt tiles that can be computed now, at most `limit`."""
        limit, pending = (
            min(limit, self._predictor.ready.max_tiles),
            PendingTiles(self._tile_size, self._limits.windows),
        )
        for sequence in begun:
            self._add(pending, sequence, sequence.num_computed, limit)
        admitting, room, taken, running = (
            self.admitting,
            self.room,
            Counter[int](),
            len(self._registry.running),
        )
        for sequence in self._registry.startable():
            if pending.count >= limit or admitting <= 0 or room < sequence.slots or sequence.in_flight:
                break
            hit = self._prefixes.match(sequence)
            taken.update(self._needed(sequence, hit))
            if not self._fits(taken, running):
                break
            self._add(pending, sequence, hit.tokens, limit)
            admitting, room, running = admitting - 1, room - sequence.slots, running + sequence.slots
        return pending

    def _add(self, pending: PendingTiles, sequence: Sequence, start: int, limit: int) -> None:
        """Adds a prompt's chunks from `start` on, until there are `limit` tiles in total."""
        last, size = self._composition.prefilled(sequence), self._tile_size
        while start < last and (room := limit - pending.count) > 0:
            end = self._composition.end(sequence, start, min(start + room * size, last), last)
            if end <= start:
                return
            whole = next_range(sequence.whole, start)
            at_once = whole[1] - start if whole is not None and whole[0] == start else 1
            seeing = meets(sequence.whole, end - (end - start) % size, end)
            pending.add(start, end, at_once, seeing or _in_tiles(sequence))
            start = end

    def cut(self, plan: PlanBuilder, begun: list[Sequence], budget: int) -> int:
        """Cuts prompts into a plan with at most `budget` tiles. Returns the number of tiles used.

        Each prompt is planned to its end before the next one. So if several prompts have a common prefix, the
        first computes it and the others find it.
        """
        registry, blocks, left = self._registry, self._blocks, budget
        # behind windows, a prompt takes its pages chunk by chunk, so two could wait for each other's
        alone = {State.PREFILLING, State.FETCHING} if any(self._limits.windows) else {State.PREFILLING}
        for sequence in begun:
            left -= self._cut(plan, sequence, left)
        while left > 0 and self.admitting > 0 and all(s.state not in alone for s in registry.running):
            first = registry.next
            # A preempted sequence with tokens in flight is not fully known yet; those behind it wait.
            if first is None or first.in_flight or first.slots > self.room:
                break
            hit = self._prefixes.match(first)
            if blocks.coming(hit) or not self._fits(self._needed(first, hit), len(registry.running)):
                break
            if not registry.images.hold(first, hit.tokens):
                continue
            self._start(first)
            blocks.admit(first.number, hit, self._composition.prefilled(first), first.salt, first.keys)
            first.num_computed = hit.tokens
            self._prefixes.note_hit(first, hit.tokens, plan.now, hit)
            if first.num_preemptions:
                self._prefixes.note_resumption(first, hit)
            if hit.fetches:
                first.state = State.FETCHING
                continue
            first.state = State.PREFILLING
            _set_slots(plan, first)
            left -= self._cut(plan, first, left)
        return budget - left

    @property
    def room(self) -> int:
        """Number of further sequences that can run, by free slots and rows of ready programs."""
        return min(
            len(self._registry.free_slots), self._predictor.ready.max_rows - len(self._registry.running)
        )

    def may_fit(self, sequence: Sequence) -> bool:
        """Whether there are pages to admit a waiting sequence now."""
        return self._fits(self._needed(sequence, self._prefixes.match(sequence)), len(self._registry.running))

    def _needed(self, sequence: Sequence, hit: Hit) -> Counter[int]:
        """Pages needed from each pool to admit a sequence: those of all its known tokens, so a prefill does
        not stop half-way.

        For a beam search, includes the next pages of its beams.
        """
        blocks, prompt, beams = self._blocks, sequence.prompt_len, sequence.slots
        needed = blocks.needed(hit, len(sequence.tokens), self._limits.at_once)
        if beams > 1:
            shared, last = prompt // blocks.page_size, min(prompt + 1, sequence.max_len - 1)
            more = beams * (blocks.pages_of(last) - shared) - (blocks.pages_of(prompt) - shared)
            needed.update(blocks.new_pages(more))
        return needed

    def _fits(self, wanted: Counter[int], running: int) -> bool:
        """Whether these pages are available and one for each running sequence, against preemption."""
        return self._blocks.available(wanted + self._blocks.new_pages(running))

    def _start(self, sequence: Sequence) -> None:
        self.admitting -= 1
        self._registry.start([sequence, *self._searches.begin(sequence)])

    def _cut(self, plan: PlanBuilder, sequence: Sequence, tiles: int) -> int:
        """Plans up to `tiles` tiles of known tokens, if there are pages for them. Returns their number."""
        used = 0
        # once: all of a step's tokens are written before any is read
        self._blocks.pass_windows(sequence.number, sequence.num_computed)
        while used < tiles and sequence.state is State.PREFILLING:
            more = self._cut_chunk(plan, sequence, tiles - used)
            if not more:
                break
            used += more
        return used

    def _cut_chunk(self, plan: PlanBuilder, sequence: Sequence, tiles: int) -> int:
        number, start, blocks, size = sequence.number, sequence.num_computed, self._blocks, self._tile_size
        last = self._composition.prefilled(sequence)
        room = blocks.room(number, min(start + tiles * size, last))
        end = self._composition.end(sequence, start, room, last)
        if end <= start:
            return 0
        if sequence in self._landed:
            del self._landed[sequence]
            _set_slots(plan, sequence)
        plan.enter(sequence.slot, blocks.grow(number, end))
        wanted = _targets(sequence, start, end), _pooled(sequence, start, end)
        states = None if blocks.states is None else blocks.states.tiles(number, start, end, size, last)
        inputs = self._registry.images.inputs(sequence, start, end)
        span = Span(number, sequence.slot, start, end - start, inputs, *wanted, states=states)
        span.ahead = ahead(sequence.whole, start, end)
        plan.spans.append(span)
        plan.work = plan.work.plus(Work(attended=pairs(start, end - start, self._limits.windows)))
        plan.longest = max(plan.longest, end)
        plan.adapted = max(plan.adapted, sequence.place)
        sequence.num_computed = end
        blocks.commit(number, sequence.keys, end)
        if end >= sequence.prompt_len:
            self._registry.images.forget(sequence)
        if end == len(sequence.tokens):
            _sample(plan, sequence)
            if end == sequence.prompt_len:
                self._fork(plan, sequence)
        elif end == last:
            sequence.state = State.DECODING
            self._repeats.begin(sequence)
        return -(-(end - start) // size)

    def _fork(self, plan: PlanBuilder, parent: Sequence) -> None:
        """Forks the prompt's other samples, which wait behind the first and share its tokens."""
        registry, blocks = self._registry, self._blocks
        while min(self.room, self.admitting) > 0 and self._fits(blocks.forked, len(registry.running) + 1):
            child = registry.next
            if (
                child is None
                or child.family != parent.family
                or child.in_flight
                or len(child.tokens) > child.prompt_len
            ):
                return
            self._start(child)
            _set_slots(plan, child)
            blocks.fork(parent.number, child.number)
            plan.enter(child.slot, blocks.grow(child.number, child.prompt_len))
            child.num_computed = child.prompt_len
            self._prefixes.note_hit(child, child.prompt_len, plan.now)
            _sample(plan, child)
            self._rows.share(parent, child)


def _set_slots(plan: PlanBuilder, sequence: Sequence) -> None:
    request, beams = sequence.request, sequence.request.beams
    members = [sequence] if sequence.beams is None else sequence.beams.members
    for index, member in enumerate(members, request.sample_index):
        plan.resets.append(
            SlotReset(
                slot=member.slot,
                params=request.params if beams is None else sampling_of(beams, logprobs=2 * beams.beam_width),
                seed=sequence.seed,
                sample_index=index,
                prompt_len=sequence.prompt_len,
                stop_token_ids=sequence.suppressed_token_ids,
                counted=list(sequence.tokens) if request.params.penalizes else None,
                lora=sequence.place,
            )
        )


def _sample(plan: PlanBuilder, sequence: Sequence) -> None:
    """Plans a sample after the last span of a sequence whose known tokens are all planned."""
    plan.samples.append(
        Sample(len(plan.spans) - 1, plan.spans[-1].length - 1, sequence.number, sequence.slot)
    )
    plan.sampled.append(sequence)
    plan.rank = max(plan.rank, sequence.variant_rank)
    sequence.state = State.HELD if sequence.searches else State.DECODING
    sequence.in_flight += 1


def _in_tiles(sequence: Sequence) -> bool:
    """Whether programs need the hidden states of all of a prompt's tokens, which only tiles pass on."""
    return sequence.request.params.prompt_logprobs is not None or sequence.request.pooling is not None


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
