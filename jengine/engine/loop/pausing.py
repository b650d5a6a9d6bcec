"""Pauses an engine, sends it to sleep and replaces its weights; the gate holds requests meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from jengine.base.errors import InvalidArgument
from jengine.base.process import return_memory
from jengine.core.request import Request
from jengine.core.weights import PAUSED, PauseMode, Tag, Version, next_version
from jengine.scheduling.requests.loras import Lora, LoraPlaces

if TYPE_CHECKING:  # operations are used in processes without jax, too
    from jengine.engine.loop.engine import Engine


class PromptAtGate(NamedTuple):
    """A prompt's requests that wait, and their adapter, which they keep even if it is unloaded."""

    requests: list[Request]
    lora: Lora | None


class Gate:
    """
    Args:
        loras: loaded ones, to note those that requests wait with.

    Attributes:
        mode: how the engine was paused; None: it is not.
        asleep: what sleep has freed.
        by_sleep: whether sleep has paused it, so that it goes on as soon as it can.
    """

    def __init__(self, loras: LoraPlaces) -> None:
        self._loras = loras
        self.mode: PauseMode | None = None
        self.asleep: set[Tag] = set()
        self.by_sleep = False
        self._held: dict[str, PromptAtGate] = {}  # by id; a prompt's requests are held together

    @property
    def plans(self) -> bool:
        """Whether steps are planned: always, or for requests that came before the pause."""
        return self.mode in (None, "wait")

    @property
    def held(self) -> int:
        """Number of requests that wait here."""
        return len(self._held)

    def hold(self, requests: tuple[Request, ...], lora: Lora | None) -> None:
        """Keeps a prompt's requests until the engine resumes.

        Raises:
            InvalidArgument: an id is in use.
        """
        for request in requests:
            if request.request_id in self._held:
                limit = "a request with this id is not finished yet"
                raise InvalidArgument("request_id", request.request_id, limit)
        together = PromptAtGate([*requests], lora)
        for request in requests:
            self._held[request.request_id] = together
            self._loras.came(lora)

    def drop(self, request_id: str) -> bool:
        """Forgets a request. Returns False if it does not wait here."""
        together = self._held.pop(request_id, None)
        if together is None:
            return False
        together.requests[:] = [one for one in together.requests if one.request_id != request_id]
        self._loras.ended(together.lora)
        return True

    def open(
        self,
        queue: Callable[[list[Request], Lora | None], object],
        fail: Callable[[list[Request], Exception], None],
    ) -> None:
        """Ends the pause, and queues the requests that waited, prompt by prompt. `fail` gets those that
        cannot be queued.
        """
        self.mode, self.by_sleep = None, False
        held, self._held = self._held, {}
        for together in {id(one): one for one in held.values()}.values():
            try:
                queue(*together)
            except Exception as error:
                fail(together.requests, error)
            for _ in together.requests:
                self._loras.ended(together.lora)


def pause(engine: Engine, mode: PauseMode) -> None:
    """Stops planning steps; `Pause` says what becomes of running requests."""
    engine.gate.mode, engine.gate.by_sleep = mode, False
    if mode == "wait":
        return
    engine.settle()
    if mode == "abort":
        engine.end_early([*engine.scheduler.registry.by_id], "abort", PAUSED)


def resume(engine: Engine) -> None:
    """Goes on with requests."""
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


def go_on(engine: Engine) -> None:
    """Resumes an engine that sleep has paused, once it has all that it needs."""
    if engine.gate.by_sleep and not engine.gate.asleep and engine.weights.there:
        resume(engine)


def idle(engine: Engine) -> bool:
    """Whether a paused engine has nothing left to do before it resumes."""
    return not (engine.gate.mode == "wait" and engine.scheduler.has_work)


def sleep(engine: Engine, level: int, mode: PauseMode, tags: Iterable[Tag]) -> bool:
    """Frees memory. Returns whether the engine sleeps; otherwise, it waits for requests, and must be asked
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


def wake_up(engine: Engine, tags: Iterable[Tag]) -> None:
    """Takes back memory."""
    woken = {*tags} & engine.gate.asleep
    if "weights" in woken:
        engine.runner.move_weights(away=False)
    if "kv_cache" in woken:
        engine.runner.allocate_cache()
    engine.gate.asleep -= woken
    go_on(engine)


def replace_weights(
    engine: Engine, weights: Any, version: Version | None, *, check_finite: bool, keep_cache: bool
) -> Version:
    """Replaces the weights, all or none."""
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
