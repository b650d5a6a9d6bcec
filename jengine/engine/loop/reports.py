"""Figures for reports, which may be missing but never stop the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jengine.core.updates import Load
from jengine.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)


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
    load = Load(
        running=scheduler.registry.num_running,
        waiting=scheduler.registry.num_waiting + at_gate,
        free_pages=blocks.capacity - blocks.owned,
        pages=blocks.capacity,
        preemptions=scheduler.registry.num_preemptions,
        cached_pages=blocks.cached,
        prefix_queries=scheduler.prefixes.queries,
        prefix_hits=scheduler.prefixes.hits,
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
    if tier is None:
        return load
    return load._replace(
        host_pages=tier.capacity,
        host_used=tier.used,
        host_queries=scheduler.prefixes.host_queries,
        host_hits=scheduler.prefixes.host_hits,
        host_declined=scheduler.prefixes.host_declined,
        host_spilled=tier.spilled,
        host_fetched=tier.fetched,
        host_evictions=tier.evictions,
    )
