"""Replays a trace on one engine or several equal ones, each with its own clock."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jengine.base.progress import progress_bar
from jengine.capacity.simulation.fast_forward import ConstantPredictor
from jengine.capacity.simulation.outcome import Outcome, joined
from jengine.capacity.simulation.times import StepTimes
from jengine.capacity.simulation.trace import RequestTrace
from jengine.capacity.simulation.virtual_engine import VirtualEngine
from jengine.core.request import SamplingParams
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.pages.block_table import GroupPages
from jengine.scheduling.requests.registry import PreemptionNeeded
from jengine.scheduling.scheduler import Scheduler
from jengine.table.program_table import ProgramTable


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
        _collected_once(),
    ):
        for own in rows:
            how = {
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
                    outcomes.append(VirtualEngine(scheduler, times, trace, own, **how).run())
                    continue
                bar.n = done
            outcomes.append(VirtualEngine(shape.scheduler(), times, trace, own, **how).run())
    return outcomes[0] if len(outcomes) == 1 else joined(outcomes)


@contextmanager
def _collected_once() -> Iterator[None]:
    """Disables the garbage collector: a replay creates no cycles, and collections would scan millions of
    objects repeatedly."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
