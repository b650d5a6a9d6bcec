"""Targets, strategies and batching modes with a real engine, from the caller's view."""

from __future__ import annotations

import time

import pytest

from benchmarks.restart import restart_scheduler
from jengine.base.errors import InvalidArgument
from jengine.core.request import Request, SamplingParams
from jengine.core.scheduling_options import SchedulingOptions
from jengine.core.updates import Ended, TokenUpdate
from jengine.engine.loop.engine import Engine
from tests.engine.running import Estimates


def with_options(engine: Engine, **options: object) -> Engine:
    """An idle engine's programs and cache with another scheduler."""
    costs = Estimates(engine.scheduler.table)
    restart_scheduler(engine, costs=costs, prefix_caching=False, options=SchedulingOptions(**options))  # type: ignore[arg-type]
    return engine


def add(engine: Engine, name: str, **level: float) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.add(
        Request(request_id=name, prompt_token_ids=[5, 6, 7], params=params, arrival=time.monotonic(), **level)
    )  # type: ignore[arg-type]


def drain(engine: Engine) -> list[object]:
    updates: list[object] = []
    while engine.has_work:
        updates += engine.step()
    return updates


def test_what_cannot_be_in_time_is_rejected_and_the_rest_served(engine: Engine) -> None:
    with_options(engine, strategy="latency", on_late="reject")
    add(engine, "late", ttft_ms=1e-6)
    add(engine, "patient", ttft_ms=1e9, tpot_ms=1e9)
    updates = drain(engine)
    assert [update for update in updates if isinstance(update, Ended)] == [Ended("late", "abort", "rejected")]
    assert [update.request_id for update in updates if isinstance(update, TokenUpdate)] == ["patient"] * 4
    load = engine.load
    assert (load.targets_met, load.targets_missed, load.targets_rejected) == (1, 0, 1)
    assert load.strategy == "latency" and sum(dict(load.decisions).values()) == 1


def test_what_cannot_be_in_time_is_served_late_and_counted(engine: Engine) -> None:
    with_options(engine, strategy="latency", ttft_ms=1e-6)
    add(engine, "late")
    assert len(drain(engine)) == 4
    assert (engine.load.targets_met, engine.load.targets_missed, engine.load.targets_rejected) == (0, 1, 0)


def test_an_idle_engine_waits_for_a_batch_without_spinning(engine: Engine) -> None:
    with_options(engine, batching="dynamic", batch_wait_ms=60.0)
    add(engine, "alone")
    steps, begin = 0, time.monotonic()
    while not engine.step():
        steps += 1
    assert time.monotonic() - begin >= 0.06 and steps < 60, "it sleeps between looks"
    drain(engine)


def test_a_strategy_is_checked_where_it_is_set(engine: Engine) -> None:
    with_options(engine, batching="static")
    assert engine.limits.strategies == ("throughput", "memory")
    with pytest.raises(
        InvalidArgument, match="must be one of throughput, memory; the others need batching='continuous'"
    ):
        engine.limits.check_strategy("latency")
    assert engine.limits.check_strategy("memory") == "memory"


def test_every_strategy_gives_the_same_tokens(engine: Engine) -> None:
    outputs = []
    for strategy in ("throughput", "latency", "memory", "auto"):
        with_options(engine, strategy=strategy, tpot_ms=1e9)
        for i in range(6):
            add(engine, str(i))
        outputs.append(
            sorted(
                (update.request_id, update.token)
                for update in drain(engine)
                if isinstance(update, TokenUpdate)
            )
        )
        assert engine.load.strategy in (strategy, "throughput")
    assert all(output == outputs[0] for output in outputs)
