"""An engine's load, from its scheduler's state."""

from __future__ import annotations

from typing import Any

from jengine.core.updates import Load
from jengine.scheduling.scheduler import Scheduler


def load_of(scheduler: Scheduler, **engine: Any) -> Load:
    """Thread-safe.

    Args:
        engine: fields of Load that the scheduler does not know.
    """
    blocks, tier = scheduler.blocks, scheduler.blocks.tier
    load = Load(
        running=scheduler.registry.num_running,
        waiting=scheduler.registry.num_waiting,
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
