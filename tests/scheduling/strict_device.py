"""A device without a model: runs plans exactly as given and rejects every one that a real device could not
run rightly.

Its cache remembers what each place holds: the keys and values of a token after a certain prefix, of one cache
group. Reading anything else, such as another sequence's page, a stale page or an unwritten place, fails at
once. With a batch-invariant table so does reading a prompt's token that a row computed, or a generated one
that a tile did. So does beginning with another state than that of all tokens before. Its next token is a
function of the seed and of all tokens before it: a wrong token anywhere shows in everything that follows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import fields, replace
from functools import partial
from typing import Any

from msgspec import structs

from jengine.core.beam_outputs import sampling_of
from jengine.core.beam_params import BeamSearchParams
from jengine.core.request import Request, SamplingParams
from jengine.core.scheduling_options import SchedulingOptions
from jengine.core.updates import ScoredToken
from jengine.scheduling.requests.images import Images
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.step_plan import Span, StepPlan, Tokens
from jengine.table.program_table import MOST_DRAFTS, VARIANTS, BurstKey, ProgramTable, sampler_variant
from jengine.table.ready_programs import ReadyPrograms, TableKey, by_use, first_needed
from tests.schedulers import make_scheduler
from tests.scheduling.answers import EOS, alone, beams_alone, found_after, next_token
from tests.scheduling.embedding_memory import EmbeddingMemory
from tests.scheduling.host_memory import Content, HostMemory
from tests.scheduling.plan_checks import check_plan, run_drafts
from tests.scheduling.slot import Slot
from tests.scheduling.state_memory import StateMemory

FULL = (None,)
OPTIONS = {field.name for field in fields(SchedulingOptions)}
ENCODERS = 8, 16  # patches


class StrictDevice:
    """
    Attributes:
        sequences: by number; only their tokens and what their cached pages are found by are looked at.
        loras: numbers of adapters by place.
        hits: tokens that were not computed because the cache had them.
        copies: pages copied.
        bursts: that were run.
        prefilled: tokens that tiles computed.
        repeated: tokens that rows computed again.
        on_rows: tokens of prompts that rows computed.
        several: spans of several rows with known tokens.
        ready: programs that it has.
        fewer: how often a span with drafts has yielded fewer tokens than planned.
        verified: drafts that were right.
        drafted: spans for which its draft model proposed tokens.
        propose: the draft model: all tokens that a sequence will generate, right or wrong.
    """

    def __init__(self, table: ProgramTable, *, page_size: int, num_pages: int, max_num_seqs: int,
        max_num_batched_tokens: int,
                 windows: List[int | None] = FULL, num_states: int = 0) -> None:  # fmt: skip
        self.states = StateMemory(num_states, table.tile_size)
        self.table, self.page_size, self.num_pages, self.windows = table, page_size, num_pages, windows
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.slots: dict[int, Slot] = {}
        self.sequences: dict[int, Sequence] = {}
        # (page, offset) -> (cache group, hash of the salt and all tokens up to it, whether a row computed it)
        self.cache: dict[tuple[int, int], tuple[int, int, bool]] = {}
        self.bursts = self.hits = self.copies = self.prefilled = self.repeated = self.fewer = 0
        self.on_rows = self.several = self.verified = self.drafted = 0
        self.propose: Callable[[Sequence], List[int]] = lambda _: ()
        self.ready: set[TableKey] = {*table.all_keys()}
        self.host = HostMemory(self._page, self._set_page)
        self.embeddings, self.loras = EmbeddingMemory(), dict[int, int]()
        self.through_host = False  # whether rows bring their tokens along
        self._step = self._needed = 0  # numbers of this step, and of the last one whose samples it may read

    def run(self, plan: StepPlan) -> tuple[Tokens, dict[int, ScoredToken]]:
        """Runs a plan. Returns the tokens of every sample, and the candidates of beams."""
        rows, decoding = check_plan(self, plan), len(plan.spans) - plan.prompts
        self._needed, self._step = self._step - plan.overtakes, self._step + 1
        self._take_updates(plan)
        if plan.steps > 1:
            return self._run_burst(plan), {}
        run_drafts(self, plan)
        # with true positions; tokens of longer rows, by index of the span
        spans: list[Span] = [*plan.spans]
        several = dict[int, list[int]]()
        for i, span in enumerate(plan.spans[:decoding]):
            if span.known < 0:
                token, at = self._last(span)
                spans[i] = structs.replace(span, start=at)
                if span.guesses:
                    several[i] = self._verify(spans[i], plan.trunk.pages)
                    continue
                tokens = [token]
            else:
                tokens, sequence = self._given(span), self.sequences[span.seq]
                if sequence.searches:  # its block table says which beam it goes on from
                    assert span.length == 1
                    self.slots[span.slot].tokens = sequence.tokens[: span.start]
                else:
                    assert self.table.batch_invariant or self.through_host
                    self.repeated += span.length
            self._write(spans[i], tokens, plan.trunk.pages)
        # a span on rows may follow one of its sequence in tiles
        for span in [*plan.spans[rows:], *plan.spans[decoding:rows]]:
            tokens = self._given(span)
            self._start(span)
            self.prefilled += span.length
            self.on_rows += span.length * (span.tokens is None)
            self._write(span, tokens, plan.trunk.pages)
        # writes come first: a tile attends to tiles before it in the same step, of other sequences too
        for i, span in enumerate(spans):
            if i not in several:
                self._read(span)
        sampled, found = list[int](), dict[int, ScoredToken]()
        for row, sample in enumerate(plan.samples):
            span, slot = spans[sample.span], self.slots[sample.slot]
            if sample.span in several:
                assert several[sample.span] and sample.offset == span.length - len(several[sample.span])
                sampled.append(several[sample.span].pop(0))
                continue
            reset, giver = slot.reset, self.slots[span.slot]
            assert sample.offset == span.length - 1
            if sample.slot != span.slot:  # another sample of one prompt
                assert (
                    slot.tokens == []
                    and reset.seed == giver.reset.seed
                    and reset.sample_index != giver.reset.sample_index
                )
                slot.tokens = [*giver.tokens]
                self._read(Span(sample.seq, sample.slot, span.start, span.length))
            assert VARIANTS.index(plan.sampler.variant) >= VARIANTS.index(sampler_variant(reset.params))
            if (beams := self.sequences[sample.seq].request.beams) is not None:
                assert sample.slot == span.slot
                found[row] = found_after(
                    slot.tokens, reset.seed, reset.sample_index, beams.beam_width, beams.temperature
                )
                slot.last = None  # the host chooses
                sampled.append(found[row].token)
                continue
            sampled.append(self._sample(slot, span.start + sample.offset + 1))
        assert not any(several.values()), "a row of a draft without a sample"
        return sampled, found

    def _given(self, span: Span) -> list[int]:
        """The tokens that a span brings along."""
        tokens = [span.known, *(span.following or ())] if span.tokens is None else span.tokens
        assert span.start >= 0 and 1 <= len(tokens) == span.length
        sequence = self.sequences[span.seq]
        tokens = self.embeddings.read(sequence, span.start, tokens)
        assert tokens == sequence.tokens[span.start : span.start + span.length]
        self.several += span.following is not None
        return tokens

    def _last(self, span: Span) -> tuple[int, int]:
        """What a row takes from its slot: a token, and its position."""
        slot = self.slots[span.slot]
        assert slot.last is not None, "a decode row without a token to start from"
        assert slot.last[1] == span.start, "a wrong position"
        assert slot.step <= self._needed or slot.step == self._step, "a token that has not come yet"
        return slot.last

    def _sample(self, slot: Slot, position: int) -> int:
        """Samples the token at this position into a slot."""
        reset = slot.reset
        token = next_token(
            reset.seed, reset.sample_index, slot.tokens, reset.params, reset.prompt_len, reset.stop_token_ids
        )
        slot.last, slot.step = (token, position), self._step
        return token

    def _verify(self, span: Span, page_bucket: int) -> list[int]:
        """Samples of a row that reads its slot's token, and of those that read drafts. Behind a wrong draft,
        keys, values and samples are nonsense.
        """
        slot, tokens, drafts = self.slots[span.slot], list[int](), span.following
        assert drafts is not None and len(drafts) == span.guesses == span.length - 1 <= MOST_DRAFTS
        own = self.states.cut(span)
        for right, draft in enumerate([None, *drafts]):
            if right and draft != tokens[-1]:
                break
            token, at = self._last(structs.replace(span, start=span.start + right))
            self.verified += right > 0
            tokens.append(self._run_row(Span(span.seq, span.slot, at, states=own[right]), token, page_bucket))
        self.states.spoil(own[len(tokens) :])
        self.fewer += len(tokens) < span.length
        for at in range(span.start + len(tokens), span.start + span.length):
            assert page_bucket == 0 or at // self.page_size < page_bucket
            for group, table in enumerate(slot.tables):
                self.cache[table[at // self.page_size], at % self.page_size] = group, 0, True
            tokens.append(drafts[at - span.start - 1])  # as if it were right again
        return tokens

    def _run_burst(self, plan: StepPlan) -> list[list[int]]:
        """Each row's tokens, one after the other, all rows in turn."""
        tokens: list[list[int]] = [[] for _ in plan.spans]
        self.bursts += 1
        assert plan.trunk.tiles == 0 and plan.steps == self.table.steps == max(
            span.length for span in plan.spans
        )
        assert BurstKey(plan.trunk, plan.sampler, plan.steps) in self.ready and [
            (s.span, s.slot) for s in plan.samples
        ] == [(i, span.slot) for i, span in enumerate(plan.spans)]
        for number in range(plan.steps):
            for span, given in zip(plan.spans, tokens, strict=True):
                if number < span.length:
                    token, at = self._last(structs.replace(span, start=span.start + number))
                    one = Span(span.seq, span.slot, at)
                    one.states = span.states if number == 0 or span.states is None else span.states[1:] * 2
                    assert span.known < 0
                    given.append(self._run_row(one, token, plan.trunk.pages))
        return tokens

    def _run_row(self, span: Span, token: int, page_bucket: int) -> int:
        self._write(span, [token], page_bucket)
        self._read(span)
        return self._sample(self.slots[span.slot], span.start + 1)

    def _page(self, _: int, page: int) -> Content:  # whole pages alone are worth a copy
        return {offset: self.cache[page, offset] for offset in range(self.page_size)}

    def _set_page(self, _: int, page: int, content: Content) -> None:
        for offset, token in content.items():
            self.cache[page, offset] = token  # type: ignore[assignment]

    def _take_updates(self, plan: StepPlan) -> None:
        for reset in plan.resets:
            assert 1 <= reset.slot <= self.max_num_seqs
            self.slots[reset.slot] = Slot(reset, [{} for _ in self.windows])
        for group, slot, index, page in plan.table:
            assert 1 <= page < self.num_pages
            self.slots[slot].tables[group][index] = page
        targets = [target for _, _, target in plan.copies]
        assert len({*targets}) == len(targets) and not {*targets} & {source for _, source, _ in plan.copies}
        for _, source, target in plan.copies:
            self.copies += 1
            for offset in range(self.page_size):
                self.cache.pop((target, offset), None)
                if (source, offset) in self.cache:
                    self.cache[target, offset] = self.cache[source, offset]

    def _start(self, span: Span) -> None:
        """A sequence that does not begin at its first token requires that earlier ones are cached."""
        slot, sequence = self.slots[span.slot], self.sequences[span.seq]
        if not slot.tokens and span.start:
            assert span.start % self.page_size == 0 and sequence.request.params.prompt_logprobs is None
            slot.tokens = sequence.tokens[: span.start]
            self.hits += span.start

    def _write(self, span: Span, tokens: list[int], page_bucket: int) -> None:
        slot = self.slots[span.slot]
        assert span.start == len(slot.tokens), "a gap, or a token computed twice"
        for token in tokens:
            at = len(slot.tokens)
            slot.tokens.append(token)
            for group, table in enumerate(slot.tables):
                content = group, self._content(span, at), span.tokens is None
                self.cache[table[at // self.page_size], at % self.page_size] = content
        self.states.turn(span, partial(self._content, span))
        assert page_bucket == 0 or (len(slot.tokens) - 1) // self.page_size < page_bucket, (
            "a program that reads too few pages"
        )

    def _read(self, span: Span) -> None:
        """The tokens that the span's queries attend to: in a group with a window, those of the first query
        and all after it.
        """
        slot = self.slots[span.slot]
        for group, table in enumerate(slot.tables):
            window = self.windows[group]
            for at in range(0 if window is None else max(span.start - window + 1, 0), len(slot.tokens)):
                *found, by_row = self.cache[table[at // self.page_size], at % self.page_size]
                assert found == [group, self._content(span, at)], "another's page, or a stale one"
                generated = at >= len(self.sequences[span.seq].request.prompt_token_ids)
                assert by_row == generated or not self.table.batch_invariant, (
                    "computed by another program than it is alone"
                )

    def _content(self, span: Span, at: int) -> int:
        sequence, keys = self.sequences[span.seq], self.slots[span.slot].tokens[: at + 1]
        if sequence.images is not None:
            keys[: sequence.prompt_len] = sequence.keys[: min(sequence.prompt_len, at + 1)]
        return hash((sequence.request.cache_salt, sequence.lora and sequence.lora.number, *keys))


class Loop:
    """The engine's loop around a scheduler and a strict device, with every promise checked after every
    action.

    Args:
        invariant_tiles: of the prefill program of a batch-invariant table; 0: the table is none.
        prompt_rows: whether ends of prompts may lie on rows.
        drafts: tokens that a draft model proposes for a sequence; 0: there is none.
        of_gpu: whether the table is that of a GPU.
        by_row: whether other tables have more row buckets, as those of CPUs have.
        whole_tiles, max_loras: see ProgramTable, of its adapters.
    """

    def __init__(self, *, max_model_len: int, tile_size: int, page_size: int, num_pages: int,
                 max_num_seqs: int, max_num_batched_tokens: int, page_buckets: tuple[int, ...] = (0,),
                 windows: List[int | None] = FULL,
                 invariant_tiles: int = 0, num_states: int = 0, prompt_rows: bool = False, drafts: int = 0,
                 of_gpu: bool = False, by_row: bool = False, images: Images | None = None,
                 whole_tiles: int = 1, max_loras: int = 0, **options: object) -> None:  # fmt: skip
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        steps = 8 if options.get("num_scheduler_steps", 1) != 1 else 1
        build = ProgramTable.build_for_gpu if of_gpu else partial(ProgramTable.build, by_row=by_row)
        table = build(tile_size=tile_size, steps=steps, drafts=drafts, **limits)
        table = replace(table, page_buckets=page_buckets)
        if invariant_tiles:
            table = ProgramTable.build_batch_invariant(
                max_num_seqs=max_num_seqs, tiles=invariant_tiles, tile_size=tile_size, drafts=drafts
            )
        encoders = () if images is None else ENCODERS
        table = replace(table, encoders=encoders, whole_tiles=whole_tiles, adapters=max_loras)
        pages = {"page_size": page_size, "num_pages": num_pages, "windows": windows, "num_states": num_states}
        named = {name: options.pop(name) for name in OPTIONS & options.keys()}
        self.scheduler = make_scheduler(
            table,
            max_model_len=max_model_len,
            options=SchedulingOptions(**named),
            images=images,
            max_loras=max_loras,
            **pages,
            **limits,
            **options,
        )  # type: ignore[arg-type]
        if not prompt_rows:
            self.scheduler.rows_or_tiles.max_rows = 0
        self.device = StrictDevice(table, **pages, **limits)  # type: ignore[arg-type]
        self.device.through_host = self.scheduler.cohorts.through_host
        self.max_model_len = max_model_len
        self.sequences: list[Sequence] = []
        self.outputs: dict[Sequence, list[int]] = {}
        self.ended: dict[Sequence, list[int]] = {}  # with the output it had when it ended
        self.dispatched: list[tuple[StepPlan, Tokens, dict[int, ScoredToken]]] = []
        self.admitted: list[int] = []  # seeds, in the order of the slot resets
        self._coming: list[TableKey] = []
        self.last: StepPlan  # the newest plan
        self._draw = random.Random(0)
        self.ending = 0.5  # share of the copies under way that end in a step
        self.exhausted = False  # whether every page has been owned

    def add_beams(
        self, prompt: list[int], params: BeamSearchParams, priority: int = 0, **fields: Any
    ) -> Sequence:
        seed = len(self.sequences)
        request = Request(request_id=f"r{seed}", prompt_token_ids=prompt, params=sampling_of(params),
            priority=priority, beams=params, **fields)  # fmt: skip
        self.scheduler.limits.validate(request, EOS)
        sequence = self.scheduler.add(request, seed=seed, eos_token_ids=EOS)
        self.sequences.append(sequence)
        self.outputs[sequence] = []
        self.check()
        return sequence

    def _check_beams(self, sequence: Sequence) -> None:
        assert sequence.finish_reason is not None and sequence.in_flight == 0
        if sequence.finish_reason != "abort" and sequence.request.beams.temperature == 0.0:  # type: ignore[union-attr]
            assert sequence.found == beams_alone(sequence.request, sequence.seed, self.max_model_len)

    def add(self, prompt: list[int], priority: int = 0, n: int = 1, salt: str | None = None,
            targets: dict[str, object] | None = None, **params: object) -> Sequence:  # fmt: skip
        """Adds the `n` samples of a prompt; returns the first."""
        seed = len(self.sequences)
        first: Sequence | None = None
        for index in range(n):
            request = Request(request_id=f"r{seed}.{index}", prompt_token_ids=prompt,
                params=SamplingParams(**params), priority=priority,  # type: ignore[arg-type]
                              sample_index=index, cache_salt=salt, **(targets or {}))  # type: ignore[arg-type]  # fmt: skip
            self.scheduler.limits.validate(request, EOS)
            sequence = self.scheduler.add(
                request, seed=seed, eos_token_ids=EOS, family=None if first is None else first.number
            )
            first = first or sequence
            self.sequences.append(sequence)
            self.device.sequences[sequence.number] = sequence
            self.outputs[sequence] = []
        self.check()
        assert first is not None
        return first

    def begin_with_few(self) -> None:
        """Starts with only the programs that serve any request; `get_more` adds the others."""
        table = self.scheduler.table
        self._coming = [key for key in by_use(table) if key not in first_needed(table)]
        self._let_use(first_needed(table))

    def get_more(self, count: int) -> None:
        self._let_use([*self.device.ready, *self._coming[:count]])
        del self._coming[:count]

    def _let_use(self, keys: list[TableKey]) -> None:
        before = self.scheduler.predictor.ready.max_rows if len(keys) >= len(self.device.ready) else 0
        self.scheduler.predictor.ready, self.device.ready = ReadyPrograms(self.scheduler.table, keys), {*keys}
        assert self.scheduler.predictor.ready.max_rows >= before

    def abort(self, sequence: Sequence) -> None:
        found = self.scheduler.abort(sequence.request_id)
        assert found is (None if sequence in self.ended else sequence)
        self.check()

    def stop_at_string(self, sequence: Sequence) -> None:
        """Does what the engine does when a sequence's text completes a stop string."""
        self.scheduler.finish(sequence, "stop", "text")
        self.check()

    def step(self, ahead: int) -> bool:
        """Plans and runs one step, then collects all but the last `ahead` steps. Returns False if there was
        nothing to run."""
        if self.scheduler.blocks.tier is not None:
            self.scheduler.swapped(*self.device.host.ended(self._draw, self.ending))
        if self.scheduler.speculation.awaited:
            self._collect_all_but(0)
        plan = self.scheduler.schedule()
        if (swaps := self.scheduler.take_swaps()) is not None:
            self.device.host.swap(swaps)
        encoding = self.scheduler.registry.images.take_encoding()
        self.device.embeddings.encode(encoding)
        if plan is not None:
            self.last = plan
            self.admitted += [reset.seed for reset in plan.resets]
            self.device.sequences.update(
                {span.seq: self.scheduler.registry.by_number.get(span.seq) for span in plan.spans}
            )
            self.dispatched.append((plan, *self.device.run(plan)))
        self.check()
        self.exhausted |= self.scheduler.blocks.owned == self.scheduler.blocks.capacity
        one_by_one = max(len(self.dispatched) - 1, 0) if self.scheduler.cohorts.stages > 1 else 0
        self._collect_all_but(one_by_one if plan is None else ahead)
        return plan is not None or encoding is not None

    def _collect_all_but(self, left: int) -> None:
        while len(self.dispatched) > left:
            for _, sequence, token in self.scheduler.collect(*self.dispatched.pop(0)):
                assert sequence not in self.ended, "a token after the end"
                self.outputs[sequence].append(token)
                if sequence.searches:
                    self.outputs[sequence] = [*sequence.found[0].tokens]
            self.check()

    def drain(self, ahead: int, limit: int = 10_000) -> None:
        """Runs steps until all requests have ended."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            under_way = bool(self.dispatched)
            rejected = len(self.scheduler.acceptance.rejected)
            assert (
                self.step(ahead)
                or under_way
                or len(self.scheduler.acceptance.rejected) > rejected
                or self.scheduler.registry.fetching
            ), "unfinished requests, and nothing to run or to wait for"
        else:
            raise AssertionError(f"not done after {limit} steps")
        self.step(ahead=0)  # collects what is still under way
        self.check_idle()

    def check(self) -> None:
        self.scheduler.check_integrity()
        for sequence in self.sequences:
            if sequence.searches and not sequence.found:
                if sequence.finish_reason is not None:
                    self.ended[sequence] = []
                continue
            assert sequence.output_token_ids == self.outputs[sequence]
            if sequence.finish_reason is not None:
                assert self.ended.setdefault(sequence, sequence.output_token_ids) == sequence.output_token_ids

    def check_idle(self) -> None:
        scheduler = self.scheduler
        assert (
            not scheduler.has_work and scheduler.registry.num_running == scheduler.registry.num_waiting == 0
        )
        assert scheduler.blocks.owned == 0
        images = scheduler.registry.images
        assert not images._held and not images._waiting and not images._turns, "images of no request"
        for sequence in self.sequences:
            if sequence.searches:
                self._check_beams(sequence)
                continue
            assert sequence in self.ended and sequence.in_flight == 0
            expected, reason, stop_reason = alone(sequence.request, sequence.seed, self.max_model_len)
            if sequence.finish_reason == "abort" or sequence.stop_reason == "text":
                assert self.outputs[sequence] == expected[: len(self.outputs[sequence])]
            else:
                assert (self.outputs[sequence], sequence.finish_reason, sequence.stop_reason) == (
                    expected,
                    reason,
                    stop_reason,
                )
