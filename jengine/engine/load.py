"""An engine's load, from its scheduler's state."""

from __future__ import annotations

from typing import Any

from jengine.scheduling.scheduler import Scheduler
from jengine.updates import Load


def load_of(scheduler: Scheduler, **engine: Any) -> Load:
    """Thread-safe.

    Args:
        engine: fields of Load that the scheduler does not know.
    """
    blocks, tier = scheduler.blocks, scheduler.blocks.tier
    load = Load(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        free_pages=blocks.capacity - blocks.owned,
        pages=blocks.capacity,
        preemptions=scheduler.num_preemptions,
        cached_pages=blocks.cached,
        prefix_queries=scheduler.prefix_queries,
        prefix_hits=scheduler.prefix_hits,
        hit_pages=tuple(blocks.hit_pages.values()),
        cache_groups=tuple(blocks.hit_pages),
        evictions=blocks.evictions,
        strategy=scheduler.strategy,
        decisions=tuple(scheduler.decisions.items()),
        resumptions=scheduler.resumptions,
        targets_met=scheduler.goodput.met,
        targets_missed=scheduler.goodput.missed,
        targets_rejected=scheduler.goodput.rejected,
        **engine,
    )
    if tier is None:
        return load
    return load._replace(
        host_pages=tier.capacity,
        host_used=tier.used,
        host_queries=scheduler.host_queries,
        host_hits=scheduler.host_hits,
        host_declined=scheduler.host_declined,
        host_spilled=tier.spilled,
        host_fetched=tier.fetched,
        host_evictions=tier.evictions,
    )
