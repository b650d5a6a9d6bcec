"""Fills in a step's token masks, converts its results to updates, measures its time, and guards what the loop
computes for reports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from typing import Any

import numpy as np

from jengine.base.errors import JengineError
from jengine.core.updates import (
    BeamsFound,
    Load,
    Pooled,
    PromptScores,
    ScoredToken,
    TokenLogprobs,
    TokenUpdate,
)
from jengine.core.weights import Version
from jengine.execution.runner import StepResult
from jengine.execution.sampler import SampledLogprobs
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.rows import Collected
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import MOST_DRAFTS, TrunkKey

# Maximum tokens of a sequence in two steps: the one being planned, and the one whose results are unread.
AHEAD = 2 * (1 + MOST_DRAFTS)


def masked_rows(plan: StepPlan, by_number: Mapping[int, Sequence]) -> list[tuple[int, Sequence, List[int]]]:
    """First sampler rows that have a mask, with their sequences, if these have not ended, and drafts."""
    masked = list[tuple[int, Sequence, List[int]]]()
    for row, sample in enumerate(plan.samples):
        sequence, span = by_number.get(sample.seq), plan.spans[sample.span]
        mask = None if sequence is None else sequence.request.mask
        if sequence is not None and mask is not None and mask.free() <= AHEAD:  # the next step needs it
            if not span.guesses:
                masked.append((row, sequence, ()))
            elif not sample.offset:
                masked.append((row, sequence, span.following or ()))
    return masked


def fill_masks(rows: np.ndarray, sequence: Sequence, drafts: List[int]) -> tuple[int, Exception] | None:
    """Writes a sequence's masks: for its next token, and for those that follow each of the drafts.

    Stops at a draft that is not allowed: the rows behind it never count.

    Args:
        rows: uint32 [1 + drafts, words], all set.

    Returns:
        The number of drafts after which no mask could be computed, at least 1, and the error, which concerns
        the request only if so many drafts count.

    Raises:
        JengineError: no token is allowed.
    """
    mask, taken = sequence.request.mask, 0
    assert mask is not None
    try:
        for number, words in enumerate(rows):
            try:
                fill_mask(words, sequence, number)
            except Exception as error:
                if not number:
                    raise
                return number, error
            if number < len(drafts):
                draft = drafts[number]
                if not words[draft // 32] >> np.uint32(draft % 32) & 1:
                    break
                mask.accept(draft)
                taken += 1
    finally:
        if taken:
            mask.rollback(taken)
    return None


def fill_mask(words: np.ndarray, sequence: Sequence, drafts: int = 0) -> None:
    """Writes a sequence's mask to `words`. Applies min_tokens too, as programs do, to detect an empty mask.

    A complete grammar that nothing may follow ends the output, whatever the other constraints say.

    Args:
        drafts: number of tokens that the mask has accepted beyond those of the sequence.

    Raises:
        JengineError: no token is allowed.
    """
    request = sequence.request
    assert request.mask is not None
    request.mask.fill(words)
    if len(sequence.tokens) + drafts - sequence.prompt_len < request.params.min_tokens:
        tokens = np.array(sequence.suppressed_token_ids, np.int64)
        np.bitwise_and.at(words, tokens // 32, ~(np.uint32(1) << (tokens % 32).astype(np.uint32)))
    if not words.any() and request.mask.is_complete():
        ends = np.array(sequence.eos_token_ids, np.int64)
        np.bitwise_or.at(words, ends // 32, np.uint32(1) << (ends % 32).astype(np.uint32))
    if not words.any():
        raise JengineError(
            "structured_outputs, allowed_token_ids, bad_words and min_tokens together allow no token"
        )


log = logging.getLogger(__name__)


def single_updates(collected: Collected, version: Version) -> list[TokenUpdate | Pooled | BeamsFound]:
    """The updates of a step in which each sequence has one token, or a pooled result."""
    return [
        TokenUpdate(
            s.request_id,
            token,
            s.finish_reason,
            s.stop_reason,
            None,
            s.num_preemptions,
            s.scheduled,
            s.num_cached,
            version,
        )
        if s.pooled is None
        else pooled_update(s, version)
        for s, token in zip(collected.sequences, collected.tokens, strict=True)
    ]


def several_updates(
    collected: Iterable[tuple[int, Sequence, int]], got: SampledLogprobs | None, version: Version
) -> list[TokenUpdate | Pooled | BeamsFound]:
    """Updates for tokens of which a sequence may have several. The last one has the finish reason."""
    updates: list[TokenUpdate | Pooled | BeamsFound] = []
    later = set[int]()
    for row, s, token in reversed([*collected]):
        if s.pooled is not None:
            updates.append(pooled_update(s, version))
            continue
        if s.searches:
            updates.append(BeamsFound(s.request_id, s.found, *facts_of(s, version)))
            continue
        reason, stop_reason = (None, None) if s.number in later else (s.finish_reason, s.stop_reason)
        later.add(s.number)
        count = s.request.params.logprobs
        logprobs = None if count is None or got is None else logprobs_of(got, row, count)
        updates.append(TokenUpdate(s.request_id, token, reason, stop_reason, logprobs, *facts_of(s, version)))
    return updates[::-1]


def facts_of(sequence: Sequence, version: Version) -> tuple[int, float, int, Version]:
    """The last fields of most updates."""
    return sequence.num_preemptions, sequence.scheduled, sequence.num_cached, version


def beam_candidates(plan: StepPlan, result: StepResult, scheduler: Scheduler) -> dict[int, ScoredToken]:
    """Candidates of beams, by index of the sample."""
    got, candidates = result.logprobs, {}
    for row, sample in enumerate(plan.samples if got is not None and scheduler.searches.running else ()):
        sequence = scheduler.registry.by_number.get(sample.seq)
        if sequence is not None and sequence.request.beams is not None and got is not None:
            token = result.tokens[row]
            assert isinstance(token, int)
            candidates[row] = ScoredToken(token, logprobs_of(got, row, 2 * sequence.request.beams.beam_width))
    return candidates


def pooled_update(sequence: Sequence, version: Version) -> Pooled:
    """The update for a finished embedding request."""
    assert sequence.pooled is not None and sequence.request.pooling is not None
    embedding = sequence.pooled.vector(sequence.request.pooling).tobytes()
    return Pooled(sequence.request_id, embedding, *facts_of(sequence, version))


def logprobs_of(got: SampledLogprobs, row: int, count: int) -> TokenLogprobs:
    top = zip(got.top_ids[row, :count].tolist(), got.top_logprobs[row, :count].tolist(), strict=True)
    return TokenLogprobs(float(got.logprobs[row]), int(got.ranks[row]), list(top))


def prompt_scores(plan: StepPlan, scores: SampledLogprobs, scheduler: Scheduler) -> list[PromptScores]:
    """Log probabilities of tiles' prompt tokens, for requests that want them and have not ended."""
    out, table = [], scheduler.table
    for i, (number, offset, length) in enumerate(table.place(plan.spans).tiles):
        span = plan.spans[number]
        targets = (span.targets or [])[offset : offset + length]
        sequence = scheduler.registry.by_number.get(span.seq)
        if targets and sequence is not None:
            count = sequence.request.params.prompt_logprobs
            assert count is not None
            logprobs = [logprobs_of(scores, i * table.tile_size + j, count) for j in range(len(targets))]
            out.append(PromptScores(sequence.request_id, span.start + offset + 1, targets, logprobs))
    return out


def add_pooled(plan: StepPlan, pooled: np.ndarray, scheduler: Scheduler) -> None:
    """Adds tiles' sums to those of their sequences, if these have not ended."""
    for i, (number, offset, length) in enumerate(scheduler.table.place(plan.spans).tiles):
        span = plan.spans[number]
        sequence = scheduler.registry.by_number.get(span.seq)
        if (
            span.pool is not None
            and span.pool < offset + length
            and sequence is not None
            and sequence.pooled is not None
        ):
            sequence.pooled.add(span.start + max(span.pool, offset), span.start + offset + length, pooled[i])


class StepClock:
    """Takes the loop's times, all from one clock, and reports step durations to the costs.

    A device runs one step after the other. A step begins when it is dispatched or when the previous one ends,
    whichever is later. It ends when the host reads it, if the host had to wait. Otherwise its end is unknown,
    and neither this step nor a step that was started before its end was seen is counted.

    In a pipeline, steps end one stage's seconds after each other while all stages have work, if they run the
    same program. Other steps are not counted: one that is longer than the one before reaches the last stage
    late.
    """

    def __init__(self, stages: int = 1) -> None:
        self._stages = stages
        self._trunk: TrunkKey | None = None  # of the last step that was read
        self._ended, self._exactly = 0.0, True  # end of the last step that was read, and whether it is exact
        self._planning = 0.0
        # the last step that was read, while the loop runs without a pause
        self._collected: StepPlan | None = None

    def planning(self, now: float, costs: StepCosts) -> None:
        """The loop starts to plan the next step."""
        self._planning, plan, self._collected = now, self._collected, None
        if plan is not None:
            costs.observe_collect(len(plan.spans), plan.trunk.tiles, now - self._ended)

    def dispatched(self, plan: StepPlan, now: float, costs: StepCosts) -> None:
        """A step has been planned and dispatched."""
        costs.observe_plan(len(plan.spans), plan.trunk.tiles, now - self._planning)

    def read(
        self, plan: StepPlan, started: float, now: float, costs: StepCosts, *, waited: bool, counts: bool
    ) -> float:
        """A step's tokens have arrived. Returns its device seconds; 0.0 if unknown.

        Args:
            started: time of the call of its first program.
            waited: whether the host had to wait for the tokens.
            counts: whether the step ran only its drafts, its trunk and its sampler, back to back, and began
                while all stages had work.
        """
        known = waited and counts and (self._exactly or started >= self._ended)
        known = known and (self._stages == 1 or plan.trunk == self._trunk)
        self._trunk = plan.trunk
        seconds = now - max(started, self._ended) if known else 0.0
        if known and plan.steps == 1:
            costs.observe(plan.trunk, plan.sampler, plan.work, seconds, plan.draft)
        elif known:
            costs.observe_burst(plan.burst, plan.work, seconds)
        self._ended, self._exactly, self._collected = now, waited, plan
        return seconds

    def pause(self) -> None:
        """Nothing is left to do. Host time from here on does not belong to a step."""
        self._collected = None


class Reports:
    """Computes figures that no step depends on: loads, predictions, totals, traces and recordings.

    A figure that cannot be computed is missing. It is counted, and its cause is logged once.

    Attributes:
        faults: number of figures that could not be computed; each is a bug or a full disk.
    """

    def __init__(self) -> None:
        self.faults = 0
        self._logged: set[tuple[str, type[Exception]]] = set()

    def figure[T, U](self, name: str, compute: Callable[[], T], otherwise: U) -> T | U:
        """Returns the result of `compute`, or `otherwise` if that raises an exception. Thread-safe."""
        try:
            return compute()
        except Exception as error:
            self.faults += 1
            if (name, type(error)) not in self._logged:
                self._logged.add((name, type(error)))
                log.warning(
                    "the engine continues without its %s, which could not be computed", name, exc_info=True
                )
            return otherwise


def load_of(scheduler: Scheduler, at_gate: int, **engine: Any) -> Load:
    """Thread-safe.

    Args:
        at_gate: number of requests that wait until the engine resumes.
        engine: fields of Load that the scheduler does not know.
    """
    blocks, tier = scheduler.blocks, scheduler.blocks.tier
    if tier is not None:
        engine |= {
            "host_pages": tier.capacity,
            "host_used": tier.used,
            "host_spilled": tier.spilled,
            "host_fetched": tier.fetched,
            "host_evictions": tier.evictions,
        }
    return Load(
        running=scheduler.registry.num_running,
        waiting=scheduler.registry.num_waiting + at_gate,
        free_pages=blocks.capacity - blocks.owned,
        pages=blocks.capacity,
        preemptions=scheduler.registry.num_preemptions,
        cached_pages=blocks.cached,
        prefix_queries=scheduler.prefixes.queries,
        prefix_hits=scheduler.prefixes.hits,
        host_queries=scheduler.prefixes.host_queries,
        host_hits=scheduler.prefixes.host_hits,
        host_declined=scheduler.prefixes.host_declined,
        hit_pages=tuple(blocks.hit_pages.values()),
        cache_groups=tuple(blocks.hit_pages),
        evictions=blocks.evictions,
        strategy=scheduler.admission.strategy,
        decisions=tuple(scheduler.admission.decisions.items()),
        resumptions=scheduler.prefixes.resumptions,
        targets_met=scheduler.acceptance.goodput.met,
        targets_missed=scheduler.acceptance.goodput.missed,
        targets_rejected=scheduler.acceptance.goodput.rejected,
        drafts=scheduler.speculation.drafts,
        draft_tokens=scheduler.speculation.tokens,
        accepted_tokens=tuple(scheduler.speculation.accepted),
        page_size=blocks.page_size,
        **engine,
    )
