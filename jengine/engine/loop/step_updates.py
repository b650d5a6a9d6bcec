"""Converts a step's results to updates."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jengine.core.updates import BeamsFound, Pooled, PromptScores, ScoredToken, TokenLogprobs, TokenUpdate
from jengine.core.weights import Version
from jengine.execution.runner import StepResult
from jengine.execution.sampler import SampledLogprobs
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.step.collected import Collected
from jengine.scheduling.step_plan import StepPlan


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
            counts = s.num_preemptions, s.scheduled, s.num_cached
            updates.append(BeamsFound(s.request_id, s.found, *counts, version))
            continue
        ends = (None, None) if s.number in later else (s.finish_reason, s.stop_reason)
        later.add(s.number)
        count = s.request.params.logprobs
        logprobs = None if count is None or got is None else logprobs_of(got, row, count)
        updates.append(
            TokenUpdate(
                s.request_id, token, *ends, logprobs, s.num_preemptions, s.scheduled, s.num_cached, version
            )
        )
    return updates[::-1]


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
    return Pooled(
        sequence.request_id,
        embedding,
        sequence.num_preemptions,
        sequence.scheduled,
        sequence.num_cached,
        version,
    )


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
