"""The memory that an engine takes on this machine, from a model's configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from jengine.base.errors import OutOfMemory
from jengine.base.host_memory import total_memory
from jengine.capacity.planning.ahead_of_time import describe_for
from jengine.capacity.planning.plan import estimated
from jengine.core.config import EngineConfig
from jengine.execution.memory import DeviceMemory, pages_beside, pages_that_fit


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes on each device.

    Attributes:
        weights: of the model, as the engine keeps them.
        cache: of the KV cache that the engine makes by default; on a GPU, what the rest leaves.
        beside: of programs and slots.
        memory: of the device, as far as jengine may use it.
        device: its kind.
        fits: whether weights, programs and at least one sequence's pages fit.
    """

    weights: int
    cache: int
    beside: int
    memory: int
    device: str
    fits: bool


def need_of(config: EngineConfig) -> Need:
    """What an engine with these options needs on this machine. Reads no weights and compiles nothing.

    Raises:
        ModelError: the model cannot be read, or is not supported.
        InvalidArgument: the model or device does not support an option.
    """
    spec = describe_for(config, None)
    device = spec.mesh.local_devices[0]
    on_cpu = device.platform == "cpu"
    limit = total_memory() if on_cpu else (device.memory_stats() or {}).get("bytes_limit", 0)
    memory = DeviceMemory.of(limit, spec, estimated(spec).values())
    try:
        pages = pages_that_fit(config, spec) if on_cpu else pages_beside(config, spec, memory)
    except OutOfMemory:
        pages = 0
    return Need(
        memory.weights,
        pages * memory.page + memory.states,
        memory.beside - memory.weights - memory.states,
        limit,
        device.device_kind,
        pages > 0 and memory.beside + pages * memory.page <= limit,
    )
