"""Whether there is memory for one more engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jengine.spi import available_memory

BESIDE = 3 << 29  # bytes that an engine on a CPU takes beside its weights, until it was measured


class Memory(Protocol):
    """The devices' memory."""

    def fits(self, wanted: MemoryNeed, loaded: Sequence[MemoryNeed]) -> bool:
        """Whether an engine can be started beside the loaded ones."""


@dataclass(slots=True)
class MemoryNeed:
    """What an engine needs.

    Attributes:
        share: of a GPU's memory that it reserves, gpu_memory_utilization.
        bytes: of the host's memory; an estimate until it was loaded once.
    """

    share: float = 0.0
    bytes: int = BESIDE


class GpuMemory:
    """GPUs that all engines use. JAX reserves an engine's share when it starts."""

    def fits(self, wanted: MemoryNeed, loaded: Sequence[MemoryNeed]) -> bool:
        return wanted.share + sum(need.share for need in loaded) <= 1.0


class HostMemory:
    """This machine's memory, or what is left of the container's."""

    def fits(self, wanted: MemoryNeed, loaded: Sequence[MemoryNeed]) -> bool:
        return wanted.bytes <= available_memory()


def memory_of(devices: str) -> Memory:
    """The memory of these devices, as ModelInfo.devices names them."""
    return HostMemory() if devices.rpartition(" ")[2].lower() == "cpu" else GpuMemory()


def resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 if this is not known."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
