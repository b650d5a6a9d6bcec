"""The scheduler's cost for prompts' pages: microseconds a page at admission, and a step while a prompt waits.
Part of host_cost.py.

A prompt of 8,192 tokens, in pages of 16. Cold: nothing is cached, and one step computes all of it. Hit:
everything but its last page is cached. Waiting: it is first in the queue, 448 of its pages are cached, and
there are too few pages for the others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jengine.core.request import Request, SamplingParams
from jengine.execution.batch import BatchLayout
from jengine.execution.slots import pack_updates
from jengine.scheduling.costs.step_costs import Slopes, StepCosts
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import ProgramTable
from tests.schedulers import make_scheduler

PAGE_SIZE, TILE_SIZE, TOKENS, SEQUENCES = 16, 64, 8192, 8
PAGES = TOKENS // PAGE_SIZE
SHARED = 448  # cached pages of the waiting prompt
GOAL = 300.0  # microseconds a step while it waits


def loaded_scheduler(num_pages: int) -> Scheduler:
    budget = TOKENS + SEQUENCES
    table = ProgramTable.build(max_num_seqs=SEQUENCES, max_num_batched_tokens=budget, tile_size=TILE_SIZE)
    return make_scheduler(
        table,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=budget,
        max_model_len=2 * TOKENS,
        prefix_caching=True,
        # free attention, so that a prompt takes one step
        costs=StepCosts(table, slopes=Slopes(0.0, 0.0, 0.0)),
    )


def add(scheduler: Scheduler, name: str, prompt: list[int], output: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    scheduler.add(Request(request_id=name, prompt_token_ids=prompt, params=params), seed=0, eos_token_ids=())


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """(microseconds, result of the call)."""
    start = time.perf_counter()
    result = call()
    return 1e6 * (time.perf_counter() - start), result


def step(scheduler: Scheduler) -> tuple[float, float, StepPlan]:
    """(microseconds of `schedule`, of packing, plan). The plan is also collected."""
    planned, plan = timed(scheduler.schedule)
    assert plan is not None
    layout = BatchLayout.of(plan.trunk, scheduler.table, page_size=PAGE_SIZE, groups=1)
    packed, _ = timed(lambda: ([*pack_updates(*layout.rest(plan))], layout.pack(plan)))
    scheduler.collect(plan, [[1] for _ in plan.samples])
    return planned, packed, plan


def admit(rounds: int) -> dict[str, list[float]]:
    """Microseconds a page, by part: for cold prompts, for equal prompts, and for releasing their pages."""
    rng = np.random.default_rng(0)
    took: dict[str, list[float]] = {
        name: [] for name in ("cold: schedule", "cold: pack", "hit: schedule", "hit: pack", "finish")
    }
    scheduler = loaded_scheduler(4 * PAGES)  # from the fourth round on, pages are evicted
    for i in range(rounds):
        prompt = rng.integers(2, 32000, TOKENS).tolist()
        for kind in ("cold", "hit"):
            add(scheduler, kind, prompt, 2)
            planned, packed, plan = step(scheduler)
            assert plan.spans[0].length == (TOKENS if kind == "cold" else PAGE_SIZE)
            took[f"{kind}: schedule"].append(planned / PAGES)
            took[f"{kind}: pack"].append(packed / PAGES)
            if i % 2:
                ended, _ = timed(lambda kind=kind: scheduler.abort(kind))
                took["finish"].append(ended / PAGES)
            else:
                step(scheduler)
            assert not scheduler.has_work
    return took


def wait(rounds: int) -> dict[str, list[float]]:
    """Microseconds of `schedule` with one decoding sequence, alone and while a prompt waits for pages."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, 32000, TOKENS).tolist()
    scheduler = loaded_scheduler(PAGES + (PAGES - SHARED))
    took: dict[str, list[float]] = {"alone": [], "waiting": []}
    add(scheduler, "runs", prompt, 16 * rounds)
    step(scheduler)
    for i in range(rounds):
        if i:
            scheduler.abort("waits")
        took["alone"] += [step(scheduler)[0] for _ in range(4)]
        add(
            scheduler,
            "waits",
            prompt[: SHARED * PAGE_SIZE] + rng.integers(2, 32000, TOKENS - SHARED * PAGE_SIZE).tolist(),
            16,
        )
        took["waiting"] += [step(scheduler)[0] for _ in range(8)]
        assert scheduler.registry.num_waiting == 1
    return took


def measure(rounds: int) -> dict[str, Any]:
    """Measures and prints medians."""
    pages = {name: round(statistics.median(values), 2) for name, values in admit(rounds).items()}
    steps = {name: round(statistics.median(values), 1) for name, values in wait(rounds).items()}
    print(f"\na prompt of {PAGES} pages: microseconds a page\n")
    for name, value in pages.items():
        print(f"{name:28}{value:8.2f}")
    print("\nschedule with one row, microseconds\n")
    for name, value in steps.items():
        print(f"{name:28}{value:8.1f}")
    print(
        f"\nwhile a prompt waits: {steps['waiting'] - steps['alone']:.0f} us a step more; the goal is"
        f" {GOAL:.0f}"
    )
    return {"pages": PAGES, "microseconds_a_page": pages, "microseconds_a_step": steps, "goal": GOAL}
