"""The parts of an engine that operations use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from jengine.core.request import FinishReason, Request
from jengine.core.weights import Version
from jengine.engine.gate import Gate
from jengine.engine.limits import Limits
from jengine.insight.recording.trace import Trace
from jengine.scheduling.requests.adapters import Adapter
from jengine.scheduling.scheduler import Scheduler

if TYPE_CHECKING:  # operations are used in processes without jax, too
    from jengine.engine.adapter_store import AdapterStore
    from jengine.engine.engine_parts import ModelRunner
    from jengine.engine.live_weights import FixedWeights


class Running(Protocol):
    """See Engine."""

    runner: ModelRunner
    scheduler: Scheduler
    weights: FixedWeights
    gate: Gate
    adapters: AdapterStore | None

    @property
    def limits(self) -> Limits: ...

    @property
    def weights_version(self) -> Version: ...

    def trace(self, seconds: float | None) -> Trace: ...

    def settle(self) -> None: ...

    def end_early(self, request_ids: Sequence[str], reason: FinishReason, why: str) -> None: ...

    def queue(self, requests: Sequence[Request], adapter: Adapter | None) -> object: ...
