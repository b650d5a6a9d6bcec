"""The scheduler: continuous batching with chunked prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from types import MappingProxyType

from jengine.core.request import FinishReason, Request
from jengine.core.scheduling_options import SchedulingOptions
from jengine.core.updates import ScoredToken
from jengine.scheduling.admission.admission import Admission
from jengine.scheduling.costs.draft_costs import HowMany, most_a_second
from jengine.scheduling.costs.predictor import RowsOrTiles, StepPredictor
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.drafters.choice import drafters_of
from jengine.scheduling.drafters.drafter import Drafter
from jengine.scheduling.pages.blocks import BlockManager
from jengine.scheduling.promises.acceptance import Acceptance, expect, note_first
from jengine.scheduling.prompts.prefix_lookup import PrefixLookup
from jengine.scheduling.prompts.prompt_cutter import PromptCutter
from jengine.scheduling.requests.batching import BatchInvariant, Composition
from jengine.scheduling.requests.images import Images
from jengine.scheduling.requests.loras import Lora
from jengine.scheduling.requests.registry import Registry
from jengine.scheduling.requests.sequence import Sequence, State
from jengine.scheduling.requests.sequence_limits import SequenceLimits
from jengine.scheduling.rows import Cohorts, Collected, PlanBuilder, Rows, Timeline, by_sample
from jengine.scheduling.rules.beam_searches import BeamSearches
from jengine.scheduling.rules.bursts import Bursts
from jengine.scheduling.rules.prompt_rows import PromptRows
from jengine.scheduling.rules.repeats import Repeats
from jengine.scheduling.rules.rule import Rule
from jengine.scheduling.rules.speculation import Speculation
from jengine.scheduling.shape import BatchLimits, CacheShape
from jengine.scheduling.step_plan import StepPlan, Swaps, Tokens, rows_work
from jengine.table.program_table import VARIANTS, ProgramTable
from jengine.table.ready_programs import ReadyPrograms

NO_CANDIDATES: Mapping[int, ScoredToken] = MappingProxyType({})
DEFAULTS = SchedulingOptions()


class Scheduler:
    """Plans steps, each of which runs one program of the table, and collects the sampled tokens.

    Plans run on the device once each, in the order in which they were made, and are collected in that order.
    A plan may be made before earlier ones are collected. It then assumes that every running sequence gets one
    more token from each earlier plan, or several from a burst. If an earlier token turns out to end the
    sequence, its later rows were wasted and their tokens are dropped. A beam gets no row while its previous
    one is in flight.

    Args:
        options: order, batching and targets of requests.
        images: embeddings of images on the devices; None: there are none.
        clock: monotonic seconds. Request.arrival uses the same clock. Simulations pass a virtual one.
        predictor: class of the object that predicts steps.
        drafters: propose tokens to verify; None: those of speculative_config.
        how_many_drafts: decides how many of them a step verifies.

    Attributes:
        registry: unfinished sequences.
        limits: limits of one sequence.
        predictor: looks up what steps cost, and the programs that are ready.
        rows_or_tiles: whether ends of prompts lie on rows.
        acceptance: targets of requests.
        admission: the strategy, and how many requests run.
        prefixes: the prefix cache's hits.
        prompts: cuts prompts into tiles.
        rows: the decode rows.
        searches: beam searches.
        speculation: drafts, and how many were right.
        timeline: when the device will have finished the planned steps.
        rules: features that change what rows do.
    """

    def __init__(
        self,
        table: ProgramTable,
        cache: CacheShape,
        limits: BatchLimits,
        *,
        options: SchedulingOptions = DEFAULTS,
        costs: StepCosts | None = None,
        images: Images | None = None,
        clock: Callable[[], float] = time.monotonic,
        predictor: type[StepPredictor] = StepPredictor,
        drafters: List[Drafter] | None = None,
        how_many_drafts: HowMany = most_a_second,
    ) -> None:
        self.table, self.options, self.clock = table, options, clock
        batch, recurrent = limits.max_num_batched_tokens, cache.num_states > 0
        self.composition = BatchInvariant(table.tile_size, batch) if table.batch_invariant else Composition()
        self.blocks = BlockManager(
            cache, hit_grid=self.composition.hit_grid(cache.page_size), generated=not table.batch_invariant
        )
        self.limits = SequenceLimits(
            max_model_len=limits.max_model_len,
            page_size=cache.page_size,
            pages=cache.num_pages - 1,
            windows=self.blocks.windows,
            tile_size=table.tile_size,
            whole=table.whole_tiles * table.tile_size,
            recurrent=recurrent,
            prefix=images is not None and images.prefix,
        )
        self.timeline = Timeline(limits.stages)
        self.cohorts = Cohorts(limits.stages, limits.through_host)
        self.registry = Registry(
            self.blocks,
            self.limits,
            self.composition,
            limits.max_num_seqs,
            options=options,
            places=limits.max_loras,
            images=images,
        )
        costs = StepCosts(table) if costs is None else costs
        self.predictor = predictor(ReadyPrograms(table), costs, self.blocks, self.composition, batch)
        self.acceptance = Acceptance(self.registry, self.predictor)
        # rows of a recurrent layer run side by side, and batch invariance fixes each token's program
        in_tiles = recurrent or table.batch_invariant
        self.rows_or_tiles = RowsOrTiles(
            self.predictor, self.limits.windows, 0 if in_tiles else table.tile_size - 1
        )
        self.admission = Admission(
            self.registry,
            self.predictor,
            self.acceptance,
            self.timeline,
            self.rows_or_tiles,
            self.cohorts.count,
        )
        self.prefixes = PrefixLookup(self.registry, self.predictor)
        self.rows = Rows(self.registry, self.cohorts)
        self.searches = BeamSearches(self.registry, self.rows)
        repeats = Repeats(self.registry, self.predictor, several=not recurrent)
        self.prompts = PromptCutter(
            self.registry, self.predictor, self.prefixes, self.rows, self.searches, repeats
        )
        self.speculation = Speculation(
            self.registry,
            self.predictor,
            self.timeline,
            drafters_of(options) if drafters is None else drafters,
            how_many_drafts,
        )
        self.rules: tuple[Rule, ...] = (
            repeats,
            PromptRows(self.rows_or_tiles, table.tile_size),  # drafts take the rows that it leaves
            self.speculation,
            Bursts(self.registry, self.predictor),
            self.searches,
        )
        remembering = self.rows, self.cohorts, self.prompts, *self.rules
        self.registry.forgets = [part.forget for part in remembering]

    # --- requests -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.registry.by_id)

    def add(
        self,
        request: Request,
        *,
        seed: int,
        eos_token_ids: tuple[int, ...],
        family: int | None = None,
        lora: Lora | None = None,
    ) -> Sequence:
        """Queues a request that has passed SequenceLimits.validate.

        As in vLLM, max_tokens is clipped to what fits into max_model_len.

        Args:
            family: number of the prompt's first sample; None for the first one.
            lora: the request's adapter; None: the loaded one of its name, if it names one.

        Raises:
            InvalidArgument: an unfinished request has its id, or its adapter is not loaded. Nothing is queued
                in this case.
        """
        max_len = self.limits.max_len(request)
        sequence = self.registry.add(
            request,
            seed=seed,
            max_len=max_len,
            eos_token_ids=eos_token_ids,
            family=family,
            lora=lora or self.registry.loras.get(request.lora_name),
        )
        self.acceptance.set_targets(sequence, self.clock(), lambda: self._cached(sequence))
        self.admission.queue(sequence)
        return sequence

    def _cached(self, sequence: Sequence) -> int:
        """Tokens of a new sequence that are cached on the device; a further sample has those of the first."""
        first = self.registry.by_number.get(sequence.family, sequence)
        if first is not sequence:
            return first.expected_cached
        hit = self.prefixes.match(sequence)
        return 0 if hit.fetches else hit.tokens

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence. If it has ended, changes the reason: its last token may complete a stop string."""
        if sequence.state is not State.FINISHED and reason in ("stop", "length"):
            self.acceptance.note_end(sequence, self.clock())
        self.registry.finish(sequence, reason, stop_reason)

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a request. Returns None if no unfinished request has this id."""
        sequence = self.registry.by_id.get(request_id)
        if sequence is not None:
            self.finish(sequence, "abort")
        return sequence

    def preempt_all(self) -> None:
        """Preempts all running sequences: they compute their tokens again. No step may be in flight.

        The registry counts only preemptions for lack of pages.
        """
        counted = self.registry.num_preemptions
        for sequence in [*self.registry.by_id.values()]:
            if sequence.state is not State.WAITING:
                self.registry.preempt(sequence)
        self.registry.num_preemptions = counted

    # --- steps ----------------------------------------------------------------------------------------

    @property
    def wakes_at(self) -> float:
        """Time on the clock from which there may be work though nothing is collected or added; inf: never."""
        return self.admission.wakes_at(self.clock())

    @property
    def busy_seconds(self) -> float:
        """Seconds until the device has finished all planned steps."""
        now = self.clock()
        return max(self.timeline.start(now) - now, 0.0)

    def schedule(self) -> StepPlan | None:
        """Plans the next step. Returns None if there is nothing to do until earlier steps are collected or
        requests added.

        Every decoding sequence gets a row; in a pipeline, every one of a cohort. Tiles of prompts follow:
        first sequences that have begun, then waiting ones. The strategy decides the number of tiles. If rows
        and tiles may not share a step, the plan holds one of the two; see `composition`.
        """
        plan, composition = PlanBuilder(self.clock()), self.composition
        self.predictor.adapted = self.registry.loras.highest
        self.prompts.land()
        self.admission.begin_step(plan.now)
        self.prompts.prepare_images()
        if composition.prompts_first:
            self._add_tiles(plan, self.rows.decoding())
        if not plan.tiles:
            self.rows.add(plan)
            if not (plan.rows and composition.apart):
                self._add_tiles(plan, plan.rows)
        if not plan.spans:
            return None
        composition.note(len(plan.rows), plan.tiles)
        for rule in self.rules:
            rule.lengthen(plan)
        return self._finished(plan)

    def _add_tiles(self, plan: PlanBuilder, rows: list[Sequence]) -> None:
        """Adds as many prompt tiles as the strategy decides. rows: decode rows of the step or, if it has
        none, those that wait for it.
        """
        prompts, running = self.prompts, len(self.registry.running)
        prompts.admitting = self.admission.count()
        begun = prompts.begun() if len(rows) < running else []
        pending = prompts.pending(
            begun, (self.predictor.max_num_batched_tokens - len(rows)) // self.table.tile_size
        )
        if pending.count:
            work = plan.work
            if not plan.spans:
                work = rows_work([s.num_computed for s in rows], self.limits.windows)
            longest = max(plan.longest, pending.longest)
            budget = self.admission.tiles(plan.now, rows, work, pending, longest, prompts.admitting)
            buckets = self.predictor.ready.tile_buckets
            budget = self.cohorts.share(budget, pending, buckets, rows=len(plan.rows))
            plan.tiles = prompts.cut(plan, begun, budget)

    def _finished(self, plan: PlanBuilder) -> StepPlan:
        """Chooses programs, advances the rows' sequences, and predicts the step's duration."""
        ready, costs = self.predictor.ready, self.predictor.costs
        states, steps = self.blocks.states, plan.steps
        pages = self.blocks.pages_of(self.limits.longest_after(plan.longest, steps))
        rows = len(plan.rows) + plan.more_rows
        trunk = ready.trunk(rows, plan.tiles, pages, len(plan.samples), adapted=plan.adapted)
        variant = VARIANTS[plan.rank]
        sampler = ready.sampler(trunk, variant) if steps == 1 else self.table.sampler(trunk, variant)
        if states is not None:
            for sequence, span in zip(plan.rows, plan.spans, strict=False):
                known = min(self.composition.prefilled(sequence), sequence.num_computed)
                span.states = states.row(
                    span.seq,
                    sequence.keys,
                    known,
                    span.start + span.length,
                    self.table.tile_size,
                    span.guesses,
                )
        if plan.lengthened:
            for sequence, span in zip(plan.rows, plan.spans, strict=False):
                if steps > 1 or span.guesses:
                    sequence.plan_row(span.length, least=span.length - span.guesses)
                else:  # its tokens are known, and the last one is followed by a new one
                    sequence.num_computed += span.length
                    sequence.in_flight += 1
        else:
            for sequence in plan.rows:
                sequence.num_computed += 1
                sequence.in_flight += 1
        if plan.rows:
            for rule in self.rules:
                rule.planned(plan)
        self.registry.images.turn(plan.spans, self.registry.by_number)
        built = plan.build(trunk, sampler)
        built.overtakes = self.cohorts.planned(plan)
        built.loras = self.registry.loras.take_writes()
        if steps == 1:
            built.seconds = costs.seconds(trunk, sampler, plan.work)
        else:
            built.seconds = costs.added_seconds(built.burst, plan.work)
        if plan.guesses and (drafting := built.drafting):
            built.draft = ready.draft(len(drafting), pages)
            built.seconds += costs.added_seconds(built.draft)
        if (encoding := self.registry.images.planned) is not None:
            built.seconds += costs.added_seconds(encoding.key)
        if self.blocks.tier is not None:
            swaps = self.blocks.tier.planned
            built.seconds += costs.swap_seconds(len(swaps.spills), len(swaps.fills))
        expect(plan, self.timeline.plan(plan.now, built.seconds))
        return built

    def take_swaps(self) -> Swaps | None:
        """Pages to move between device and host before the step that `schedule` has just planned, or None."""
        return None if self.blocks.tier is None else self.blocks.tier.take_swaps() or None

    def swapped(self, saved: List[int], staged: List[int]) -> None:
        """Reports finished swaps: spills into these host pages, fetches into these places."""
        assert self.blocks.tier is not None
        self.blocks.tier.saved(saved)
        self.blocks.tier.landed(staged)

    def collect(
        self, plan: StepPlan, tokens: Tokens, candidates: Mapping[int, ScoredToken] = NO_CANDIDATES
    ) -> Collected:
        """Collects a step's tokens, given for each of the plan's samples, and finishes sequences that they
        end.

        Args:
            candidates: candidates of beams, by index of the sample.

        Returns:
            The new tokens, in the plan's order. A token of a sequence that has finished meanwhile is dropped.
            A token of a preempted sequence is kept and recomputed with the others. A beam search returns only
            its last token, when it ends.
        """
        now = self.clock()
        self.timeline.collect(now)
        self.cohorts.collected()
        beams = plan.sampler.variant == VARIANTS[-1]  # perhaps, also of preempted searches
        if beams or plan.guesses or (tokens and not isinstance(tokens[0], int)):
            return self._collect_any(plan, tokens, candidates, now)
        return self._collect_single(plan, tokens, now)  # type: ignore[arg-type]

    def _collect_single(self, plan: StepPlan, tokens: list[int], now: float) -> Collected:
        """`collect` for one token each, without beams.

        Creates no objects for its rows: more than 700 new ones would start Python's garbage collection in
        every step.
        """
        sequences = [*map(self.registry.by_number.get, [sample.seq for sample in plan.samples])]
        fair, prompts, dropped = self.registry.fair, plan.prompts > 0, list[int]()
        for i, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if sequence is None:
                dropped.append(i)
                continue
            known = sequence.tokens
            if prompts and len(known) == sequence.prompt_len:
                note_first(sequence, now)
            if fair is not None:
                fair.spend(sequence.client, 1)
            sequence.in_flight -= 1
            known.append(token)
            if len(known) == sequence.max_len or token in sequence.stop_token_ids:
                self._end(sequence, token)
        if not dropped:
            return Collected(range(len(tokens)), sequences, tokens)  # type: ignore[arg-type]
        left = [i for i, sequence in enumerate(sequences) if sequence is not None]
        return Collected(left, [sequences[i] for i in left], [tokens[i] for i in left])  # type: ignore[misc]

    def _collect_any(
        self, plan: StepPlan, tokens: Tokens, candidates: Mapping[int, ScoredToken], now: float
    ) -> Collected:
        """`collect` for any step."""
        collected = Collected([], [], [])
        by_number, fair, prompts = self.registry.by_number, self.registry.fair, plan.prompts > 0
        for i, sample, sampled in by_sample(plan, tokens):
            sequence, span = by_number.get(sample.seq), plan.spans[sample.span]
            if sequence is None:
                continue
            if span.guesses:
                if (states := self.blocks.states) is not None:
                    states.settle(span.seq, span.start + len(sampled), len(sampled) - 1, self.table.tile_size)
                sequence.settle_row(span.length, least=1, results=len(sampled))
                self.speculation.note(sequence, span.guesses, len(sampled) - 1)
            sequence.in_flight -= len(sampled)
            if prompts and len(sequence.tokens) == sequence.prompt_len:
                note_first(sequence, now)
            if fair is not None:
                fair.spend(sequence.client, len(sampled))
            if sequence.searches:
                if (leader := self.searches.take(sequence, candidates.get(i))) is not None:
                    self.finish(leader, leader.found[0].finish_reason)
                    leader.tokens = [*leader.request.prompt_token_ids, *leader.found[0].tokens]
                    collected.add(i, leader, leader.tokens[-1])
                continue
            for offset, token in enumerate(sampled):
                sequence.tokens.append(token)
                collected.add(i + offset if span.guesses else i, sequence, token)
                if self._end(sequence, token):
                    break
        return collected

    def _end(self, sequence: Sequence, token: int) -> bool:
        """Finishes a sequence if its last token, this one, ends it. Returns whether it does."""
        if token in sequence.stop_token_ids:
            at_eos = token in sequence.eos_token_ids and not sequence.request.params.ignore_eos
            self.finish(sequence, "stop", None if at_eos else token)
            return True
        if len(sequence.tokens) == sequence.max_len:
            self.finish(sequence, "length")
            return True
        return False

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page, slot and request is in exactly one place."""
        self.registry.check_integrity()
        self.rows.check_integrity()
        self.cohorts.check_integrity()
        for rule in self.rules:
            rule.check_integrity()
