"""Replays a trace on one engine or several equal ones, each with its own clock."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jengine.base.process import uncollected
from jengine.base.progress import progress_bar
from jengine.capacity.simulation.fast_forward import ConstantPredictor, StepTimes
from jengine.capacity.simulation.summary import Outcome, Targets, in_target, joined
from jengine.capacity.simulation.trace import RequestTrace
from jengine.capacity.simulation.virtual_engine import VirtualEngine
from jengine.core.request import SamplingParams
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.pages.block_table import GroupPages
from jengine.scheduling.requests.registry import PreemptionNeeded
from jengine.scheduling.scheduler import Scheduler
from jengine.table.program_table import ProgramTable

LONELY = 200  # number of requests tried alone: if these miss their targets, more engines do not help
APART = 1e6  # seconds between these requests


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Everything that determines how an engine schedules: its scheduler's arguments, costs included.

    Attributes:
        options: further options, by name.
        measured: whether all costs that the scheduler may need were measured with these shapes.
    """

    table: ProgramTable
    costs: StepCosts
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    groups: Sequence[GroupPages] = (GroupPages(),)
    overlap: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    measured: bool = True

    def scheduler(self, **options: Any) -> Scheduler:
        """Creates a scheduler. options: replace these fields."""
        return Scheduler.of(
            self.table,
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            groups=self.groups,
            costs=self.costs,
            predictor=ConstantPredictor,
            **{**self.options, **options},
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
