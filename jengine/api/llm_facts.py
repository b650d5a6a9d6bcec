"""What LLM.stats and LLM.summary say of an engine."""

from __future__ import annotations

from typing import Any

from jengine.base.display import counted
from jengine.core.updates import Load
from jengine.engine.ranks import AnyEngine, ranks_of
from jengine.engine.setup.started import Started


def stats_of(engine: AnyEngine, started: Started) -> dict[str, Any]:
    load, schedulers = engine.load, [rank.scheduler for rank in ranks_of(engine)]
    return {
        "programs_compiled": started.programs_compiled,
        "programs_loaded": started.programs_loaded,
        "programs_ready": load.programs_ready,
        "programs": started.programs,
        "compiles_since_start": engine.compiles_since_start,
        "start_seconds": dict(started.seconds),
        "preemptions": sum(scheduler.registry.num_preemptions for scheduler in schedulers),
        "prefix_cache_queries": sum(scheduler.prefixes.queries for scheduler in schedulers),
        "prefix_cache_hits": sum(scheduler.prefixes.hits for scheduler in schedulers),
        "external_prefix_cache_queries": load.host_queries,
        "external_prefix_cache_hits": load.host_hits,
        "swapped_out_pages": load.host_spilled,
        "swapped_in_pages": load.host_fetched,
        "page_store": None if load.store is None else load.store._asdict(),
        "strategy": load.strategy,
        "decisions": dict(load.decisions),
        "targets": {name: getattr(load, f"targets_{name}") for name in ("met", "missed", "rejected")},
    }


def facts_of(model: str, engine: AnyEngine, started: Started) -> tuple[tuple[str, str], ...]:
    """Names and values for LLM.summary."""
    ranks = ranks_of(engine)
    scheduler, each = ranks[0].scheduler, " of each rank" if len(ranks) > 1 else ""
    blocks, max_num_seqs = scheduler.blocks, scheduler.registry.max_num_seqs
    return (
        ("model", model),
        ("numbers", started.dtype),
        ("devices", started.devices),
        ("kernels", started.kernels),
        ("programs", _programs(engine.load)),
        ("cache", f"{counted(blocks.capacity, 'page')} of {blocks.page_size} tokens{each}"),
        ("limits", f"{max_num_seqs} sequences at once{each}, {scheduler.limits.max_model_len} tokens each"),
    )


def _programs(load: Load) -> str:
    of = "" if load.programs_ready == load.programs else f"{load.programs_ready} of "
    return of + counted(load.programs, "program")
