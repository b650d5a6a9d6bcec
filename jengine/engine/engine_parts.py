"""What an engine is made over."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from jengine.execution.runner import InFlight, PendingSample, StepResult
from jengine.scheduling.step_plan import StepPlan, Swaps


class ModelRunner(Protocol):
    """What an engine needs from a runner."""

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Start a step; returns before it has run."""

    def begin(self, plan: StepPlan) -> PendingSample:
        """Start a step's trunk alone."""

    def sample(self, step: PendingSample, mask: np.ndarray | None = None) -> InFlight:
        """Start its sampler."""

    def read(self, step: InFlight) -> StepResult:
        """Wait for its tokens."""

    def swap(self, swaps: Swaps) -> None:
        """Start to move pages between the device and the host, before the next step."""

    def swapped(self) -> tuple[list[int], list[int]]:
        """Host pages whose spills have ended, and places whose pages have been staged, since the last call."""

    def wait_for_staged(self) -> None:
        """Until some pages have been staged, if any are on their way."""

    def memory_parts(self) -> dict[str, int]:
        """Bytes on this process's devices, by what they are for."""

    @property
    def on_host(self) -> bool:
        """Whether the devices' memory is this process's."""


class Arrivals(Protocol):
    """Programs that become ready while the engine runs; see execution/background.py."""

    keys: list[Any]

    @property
    def ready(self) -> int: ...

    def wait(self, timeout: float | None = None) -> bool: ...

    def stop(self) -> None: ...
