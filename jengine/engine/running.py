"""The parts of an engine that operations use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from jengine.core.request import Request
from jengine.core.weights import Version
from jengine.engine.gate import Gate
from jengine.engine.limits import Limits
from jengine.insight.recording.trace import Trace
from jengine.scheduling.scheduler import Scheduler

if TYPE_CHECKING:  # operations are used in processes without jax, too
    from jengine.engine.engine_parts import ModelRunner
    from jengine.engine.live_weights import FixedWeights


class Running(Protocol):
    """See Engine."""

    runner: ModelRunner
    scheduler: Scheduler
    weights: FixedWeights
    gate: Gate

    @property
    def limits(self) -> Limits: ...

    @property
    def weights_version(self) -> Version: ...

    def trace(self, seconds: float | None) -> Trace: ...

    def settle(self) -> None: ...

    def abort_all(self, why: str) -> None: ...

    def add(self, *requests: Request) -> object: ...
