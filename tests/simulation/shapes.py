"""Small engines and traces to simulate."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from jengine.capacity.simulation.replay import EngineShape
from jengine.capacity.simulation.trace import RequestTrace, make_trace
from jengine.core.scheduling_options import SchedulingOptions
from jengine.scheduling.costs.step_costs import Slopes, StepCosts
from jengine.scheduling.shape import BatchLimits, CacheShape
from jengine.table.program_table import ProgramTable


def make_costs(table: ProgramTable, base: float = 1e-3, token: float = 1e-5, host: float = 2e-4) -> StepCosts:
    """Linear in a step's tokens, padding included; the host needs the same time before and after a step."""
    costs = StepCosts(
        table,
        {
            **{key: (base + token * table.tokens(key)) * (1 + key.adapted / 8) for key in table.trunks()},
            **{key: 1e-6 * key.rows for key in table.samplers()},
        },
        slopes=Slopes(context=1e-7, longest=1e-8, attended=1e-8),
    )
    for _ in range(100):
        costs.observe_plan(1, 0, host)
        costs.observe_collect(1, 0, host)
    return costs


def make_shape(
    *,
    max_num_seqs: int = 4,
    tiles: int = 4,
    tile_size: int = 8,
    page_size: int = 4,
    num_pages: int = 200,
    max_model_len: int = 128,
    page_buckets: tuple[int, ...] = (0,),
    windows: Sequence[int | None] = (None,),
    overlap: bool = True,
    prefix_caching: bool = True,
    num_states: int = 0,
    host_pages: int = 0,
    max_loras: int = 0,
    **options: Any,
) -> EngineShape:
    tokens = max_num_seqs + tiles * tile_size
    steps = 8 if options.get("num_scheduler_steps", 1) != 1 else 1
    limits = {"max_num_seqs": max_num_seqs, "tile_size": tile_size}
    table = ProgramTable.build(
        max_num_batched_tokens=tokens, page_buckets=page_buckets, steps=steps, adapters=max_loras, **limits
    )
    if options.get("batch_invariant"):
        table = ProgramTable.build_batch_invariant(tiles=tiles, **limits)
    return EngineShape(
        table=table,
        cache=CacheShape(
            page_size=page_size,
            num_pages=num_pages,
            windows=windows,
            num_states=num_states,
            prefix_caching=prefix_caching,
            host_pages=host_pages,
        ),
        limits=BatchLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=tokens,
            max_model_len=max_model_len,
            max_loras=max_loras,
        ),
        costs=make_costs(table),
        options=SchedulingOptions(**options),
        overlap=overlap,
    )


def poisson(
    seed: int,
    requests: int,
    rate: float,
    prompt: tuple[int, int] = (1, 60),
    output: tuple[int, int] = (1, 60),
) -> RequestTrace:
    """Requests that come at random, so many a second, with evenly drawn lengths."""
    draw, now, rows = random.Random(seed), 0.0, []
    for _ in range(requests):
        now += draw.expovariate(rate)
        rows.append((now, draw.randint(*prompt), draw.randint(*output)))
    return make_trace(rows)
