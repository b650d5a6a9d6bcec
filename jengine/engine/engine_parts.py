"""Interfaces of the parts that an engine is built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jengine.execution.runner import InFlight, PendingSample, StepResult
from jengine.scheduling.step_plan import Encoding, StepPlan, Swaps


class ModelRunner(Protocol):
    """The interface of a runner."""

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Starts a step. Returns before it has run."""

    def begin(self, plan: StepPlan) -> PendingSample:
        """Starts a step's drafts and its trunk alone."""

    def learn_drafts(self, step: PendingSample | InFlight) -> None:
        """Waits for the step's drafts from the device, if any, and enters them into its plan."""

    def sample(self, step: PendingSample, mask: np.ndarray | None = None) -> InFlight:
        """Starts the step's sampler."""

    def read(self, step: InFlight) -> StepResult:
        """Waits for the step's tokens."""

    def use_adapters(self, packed: Mapping[int, np.ndarray]) -> None:
        """Plans name LoRA adapters by these numbers."""

    def encode(self, encoding: Encoding) -> Any:
        """Starts to encode parts of images, before the next step."""

    def swap(self, swaps: Swaps) -> None:
        """Starts to move pages between device and host, before the next step."""

    def swapped(self) -> tuple[list[int], list[int]]:
        """Host pages whose spills have finished, and places whose pages have been staged, since the last
        call.
        """

    def wait_for_staged(self) -> None:
        """Waits until some pages have been staged, if any are in transfer."""

    def free_cache(self) -> None:
        """Frees the cache and all that belongs to sequences, until `allocate_cache`."""

    def allocate_cache(self) -> None:
        """Allocates the cache again."""

    def move_weights(self, *, away: bool, keep: bool = True) -> None:
        """Moves the weights to the host's memory, or frees the model's unless `keep`; or brings them back."""

    def memory_parts(self) -> dict[str, int]:
        """Bytes on this process's devices, by use."""

    @property
    def on_host(self) -> bool:
        """Whether device memory is this process's host memory."""


class Arrivals(Protocol):
    """Programs that become ready while the engine runs; see execution/background.py and first_use.py."""

    @property
    def ready(self) -> int: ...

    def usable(self) -> list[Any]: ...

    def wait(self, timeout: float | None = None) -> bool: ...

    def prefer(self, keys: Sequence[Any]) -> None: ...

    def stop(self) -> None: ...


def programs_ready(later: Arrivals | None, number: int) -> tuple[int, int]:
    """Number of programs that are ready, and of all. Thread-safe."""
    return number if later is None else later.ready, number
