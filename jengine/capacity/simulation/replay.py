"""Replays a trace on one engine or several equal ones, each with its own clock, and searches the best options
of an engine for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from jengine.base.errors import InvalidArgument, JengineError
from jengine.base.process import uncollected
from jengine.base.progress import progress_bar
from jengine.capacity.simulation.fast_forward import ConstantPredictor, StepTimes
from jengine.capacity.simulation.summary import Outcome, ReplaySummary, Targets, in_target, joined, summarize
from jengine.capacity.simulation.trace import RequestTrace
from jengine.capacity.simulation.virtual_engine import VirtualEngine
from jengine.core.config import EngineConfig
from jengine.core.request import SamplingParams
from jengine.core.scheduling_options import SchedulingOptions
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.drafters.drafter import Drafter
from jengine.scheduling.requests.registry import PreemptionNeeded
from jengine.scheduling.scheduler import DEFAULTS, Scheduler
from jengine.scheduling.shape import BatchLimits, CacheShape
from jengine.table.program_table import ProgramTable

LONELY = 200  # number of requests tried alone: if these miss their targets, more engines do not help
APART = 1e6  # seconds between these requests


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Everything that determines how an engine schedules: its scheduler's arguments, costs included.

    Attributes:
        measured: whether all costs that the scheduler may need were measured with these shapes.
    """

    table: ProgramTable
    cache: CacheShape
    limits: BatchLimits
    costs: StepCosts
    options: SchedulingOptions = DEFAULTS
    drafters: Sequence[Drafter] | None = None
    overlap: bool = True
    measured: bool = True

    def scheduler(self, **cache: Any) -> Scheduler:
        """Creates a scheduler. cache: replace these fields of the cache."""
        return Scheduler(
            self.table,
            replace(self.cache, **cache),
            self.limits,
            options=self.options,
            costs=self.costs,
            predictor=ConstantPredictor,
            drafters=self.drafters,
        )


def replay(
    shape: EngineShape,
    trace: RequestTrace,
    *,
    replicas: int = 1,
    only: int | None = None,
    params: SamplingParams | None = None,
    fast_forward: bool = True,
    progress: bool = False,
) -> Outcome:
    """Predicts when each request gets its tokens. Replicas take turns: request i goes to replica i modulo
    `replicas`.

    Args:
        only: runs only this replica, whose requests represent all.
        params: sampling parameters of all requests, except their lengths.
        fast_forward: see VirtualEngine.
    """
    rows = [
        np.arange(replica, len(trace), replicas) for replica in (range(replicas) if only is None else [only])
    ]
    outcomes = []
    with (
        progress_bar(show=progress, total=sum(map(len, rows)), desc="simulating", unit="request") as bar,
        uncollected(),
    ):
        for part in rows:
            arguments = {
                "params": params,
                "overlap": shape.overlap,
                "fast_forward": fast_forward,
                "progress": bar.update,
            }
            times, done = StepTimes(shape.costs), bar.n
            if trace.prefixes is None and fast_forward:
                # No two prompts have a common prefix, so only resumed sequences could find pages. If no
                # preemptions occur, none need caching.
                scheduler = shape.scheduler(prefix_caching=False, host_pages=0)
                scheduler.registry.may_preempt = False
                with suppress(PreemptionNeeded):
                    outcomes.append(VirtualEngine(scheduler, times, trace, part, **arguments).run())
                    continue
                bar.n = done
            outcomes.append(VirtualEngine(shape.scheduler(), times, trace, part, **arguments).run())
    return outcomes[0] if len(outcomes) == 1 else joined(outcomes)


def replicas_needed(
    shape: EngineShape,
    trace: RequestTrace,
    targets: Targets,
    *,
    params: SamplingParams | None = None,
    progress: bool = False,
) -> tuple[int, Outcome] | None:
    """The smallest number of engines that serves `targets.share` of the requests within targets, and the
    outcome; None: no number.

    Since replicas take turns, the search simulates a single one. The returned outcome includes all.
    """

    def enough(replicas: int) -> bool:
        outcome = replay(shape, trace, replicas=replicas, only=0, params=params, progress=progress)
        return bool(in_target(outcome, trace, targets)[::replicas].mean() >= targets.share)

    rows = np.unique(np.linspace(0, len(trace) - 1, LONELY).astype(int))
    alone = trace.take(rows)
    alone = replace(alone, arrivals=APART * np.arange(len(alone)))
    if in_target(replay(shape, alone, params=params), alone, targets).mean() < targets.share:
        return None
    low, high = 0, 1  # too few, and perhaps enough
    while high < len(trace) and not enough(high):
        low, high = high, 2 * high
    high = min(high, len(trace))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    while high <= len(trace):
        outcome = replay(shape, trace, replicas=high, params=params, progress=progress)
        if in_target(outcome, trace, targets).mean() >= targets.share:
            return high, outcome
        high += 1
    return None


Objective = Literal["goodput", "latency", "throughput"]
Changes = dict[str, Any]
BEYOND = 4  # maximum size relative to the largest known program
ROUNDS = 3  # maximum number of rounds over all options
LEAST_GAIN = 0.01  # minimum improvement for a change
TILES = 32, 64, 128, 256
ROWS = 8, 16, 32, 64, 128, 256, 512
TOKENS = 128, 256, 512, 1024, 2048, 4096, 8192, 16384
PAGES = 16, 32, 64, 128


@dataclass(frozen=True, slots=True)
class Tuned:
    """
    Attributes:
        changes: options that differ from the initial ones; empty if those were the best.
        before, after: figures of the trace with the initial options, and with these.
        tried: number of simulated sets of options.
        promising: changes that are predicted to be better still, by costs that are only estimated; None: none
            are.
    """

    changes: Changes
    before: ReplaySummary
    after: ReplaySummary
    tried: int
    promising: Changes | None = None


def best_options(
    shape_of: Callable[[Changes], EngineShape],
    values: dict[str, tuple[Any, ...]],
    trace: RequestTrace,
    targets: Targets,
    *,
    objective: Objective,
    params: SamplingParams | None = None,
    tried: Callable[[], object] = lambda: None,
) -> Tuned:
    """Coordinate search: sets one option after the other to its best value, until no option improves the
    result. Only options whose costs were measured are taken: estimates have been wrong by half.

    Args:
        shape_of: returns the shape of an engine with some options changed; raises JengineError if they are
            invalid.
        values: candidate values of each option, in the order of the search.
        objective: goodput: share of requests in target, then latency; latency: mean time until a request has
            ended; throughput:
            output tokens a second until all have ended.
        tried: called after each simulation.

    Raises:
        JengineError: the initial options are invalid.
    """
    if objective == "goodput" and not targets.given(trace):
        raise InvalidArgument(
            "objective", objective, "needs targets: --target-ttft-ms, --target-tpot-ms, or the trace's"
        )
    known: dict[str, ReplaySummary | None] = {}  # keyed by changes
    estimated: list[tuple[Changes, ReplaySummary]] = []  # by costs that were not measured

    def simulated(shape: EngineShape) -> ReplaySummary:
        outcome = replay(shape, trace, params=params)
        tried()
        return summarize(outcome, trace, targets)

    def measured(changes: Changes) -> ReplaySummary | None:
        """None if an engine rejects these options, or if their costs were not measured."""
        key = repr(sorted(changes.items()))
        if key not in known:
            known[key] = None
            with suppress(JengineError):
                shape = shape_of(changes)
                summary = simulated(shape)
                if shape.measured:
                    known[key] = summary
                else:
                    estimated.append((changes, summary))
        return known[key]

    before = best = simulated(shape_of({}))
    changes: Changes = {}
    for _ in range(ROUNDS):
        start = dict(changes)
        for name, each in values.items():
            for candidate in [{**changes, name: value} for value in each if changes.get(name) != value]:
                summary = measured(candidate)
                if summary is not None and _better(objective, summary, best):
                    best, changes = summary, candidate
        if changes == start:
            break
    count = 1 + sum(summary is not None for summary in known.values()) + len(estimated)
    promising, best_estimate = None, best
    for candidate, estimate in estimated:
        if _better(objective, estimate, best_estimate):
            promising, best_estimate = candidate, estimate
    return Tuned(changes, before, best, count, promising)


def _better(objective: Objective, summary: ReplaySummary, other: ReplaySummary) -> bool:
    """Whether it is better by more than LEAST_GAIN. First, more requests are served."""
    if summary.unanswered != other.unanswered:
        return summary.unanswered < other.unanswered
    if objective == "throughput":
        return summary.output_tokens_per_second > other.output_tokens_per_second * (1 + LEAST_GAIN)
    if objective == "goodput":
        assert summary.in_target is not None and other.in_target is not None
        if abs(summary.in_target - other.in_target) > LEAST_GAIN * other.in_target:
            return summary.in_target > other.in_target
    return summary.mean_total < other.mean_total * (1 - LEAST_GAIN)


def values(config: EngineConfig, shape: EngineShape, targets: bool) -> dict[str, tuple[Any, ...]]:
    """Candidate values of each option, without programs much larger than those of `shape`."""
    rows = tuple(rows for rows in ROWS if rows <= BEYOND * shape.limits.max_num_seqs)
    tokens = tuple(tokens for tokens in TOKENS if tokens <= BEYOND * shape.limits.max_num_batched_tokens)
    tried = {"max_num_batched_tokens": tokens, "max_num_seqs": rows, "tile_size": TILES, "page_size": PAGES}
    if config.batching != "continuous":
        return tried
    return {**tried, "strategy": ("throughput", "memory", *(("latency",) if targets else ()))}
