"""Replaces an engine's weights, pauses it and sends it to sleep: what the operations of these names do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jengine.base.errors import InvalidArgument
from jengine.base.process import return_memory
from jengine.core.weights import PAUSED, PauseMode, Tag, Version, next_version
from jengine.engine.running import Running


def pause(engine: Running, mode: PauseMode) -> None:
    """See Pause."""
    engine.gate.mode, engine.gate.by_sleep = mode, False
    if mode == "wait":
        return
    engine.settle()
    if mode == "abort":
        engine.end_early([*engine.scheduler.registry.by_id], "abort", PAUSED)


def resume(engine: Running) -> None:
    """See Resume."""
    gate = engine.gate
    if gate.asleep:
        limit = "the engine sleeps: call wake_up first"
        raise InvalidArgument("asleep", ", ".join(sorted(gate.asleep)), limit)
    if not engine.weights.there:
        raise InvalidArgument("weights", None, "the engine has none: call update_weights first")
    if gate.mode is not None:
        gate.open(
            engine.queue,
            lambda requests, why: engine.end_early([one.request_id for one in requests], "error", str(why)),
        )


def go_on(engine: Running) -> None:
    """Resumes an engine that sleep has paused, once it has all that it needs."""
    if engine.gate.by_sleep and not engine.gate.asleep and engine.weights.there:
        resume(engine)


def idle(engine: Running) -> bool:
    """Whether a paused engine has nothing left to do before it resumes."""
    return not (engine.gate.mode == "wait" and engine.scheduler.has_work)


def sleep(engine: Running, level: int, mode: PauseMode, tags: Iterable[Tag]) -> bool:
    """See Sleep. Returns whether the engine sleeps; otherwise, it waits for requests, and must be asked
    again.
    """
    gate = engine.gate
    if gate.mode is None:
        pause(engine, mode)
        gate.by_sleep = True
    if not idle(engine):
        return False
    engine.settle()
    freed = {*tags} - gate.asleep
    if "kv_cache" in freed:
        engine.scheduler.preempt_all()
        engine.scheduler.blocks.reset()
        engine.runner.free_cache()
    if "weights" in freed:
        engine.weights.there = level == 1
        if level == 2 or not engine.weights.shared:
            engine.runner.move_weights(away=True, keep=level == 1)
    gate.asleep |= freed
    return_memory()
    return True


def wake_up(engine: Running, tags: Iterable[Tag]) -> None:
    """See WakeUp."""
    woken = {*tags} & engine.gate.asleep
    if "weights" in woken:
        engine.runner.move_weights(away=False)
    if "kv_cache" in woken:
        engine.runner.allocate_cache()
    engine.gate.asleep -= woken
    go_on(engine)


def replace_weights(
    engine: Running, weights: Any, version: Version | None, *, check_finite: bool, keep_cache: bool
) -> Version:
    """See UpdateWeights."""
    live, gate = engine.weights, engine.gate
    version = next_version(version, live.version)
    checked = live.check(weights, check_finite=check_finite)
    engine.settle()
    if not keep_cache:
        engine.scheduler.preempt_all()
    engine.scheduler.blocks.reset()
    if checked.encoder is not None:
        engine.scheduler.registry.images.reset()
    try:
        live.replace(checked, version)
    finally:
        if not live.there and gate.mode is None:  # the devices failed: requests wait for weights
            gate.mode, gate.by_sleep = "keep", True
    gate.asleep.discard("weights")
    go_on(engine)
    return version
