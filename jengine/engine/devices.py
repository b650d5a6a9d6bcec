"""The devices that share an engine's model: their mesh, and the link between their processes."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jengine.config import EngineConfig
from jengine.devices.cpu_threads import limit_cpu_threads
from jengine.errors import InvalidArgument
from jengine.execution.cache_folders import cache_root
from jengine.execution.kernel_objects import keep_kernels
from jengine.execution.memory import claim_gpu_memory
from jengine.parallel.link import Follower, Leader, Link, SingleProcess, host_of, join
from jengine.parallel.mesh import make_mesh
from pallas_kernels.devices import cpu_refused


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices, and how this process agrees with the others that have some of them.

    Attributes:
        root: this process's root folder of the cache.
    """

    mesh: Mesh
    link: Link
    root: Path

    @classmethod
    def take(cls, config: EngineConfig, link: Link) -> Devices:
        """The devices that the options ask for. Starts JAX.

        Raises:
            InvalidArgument: there are too few.
        """
        mesh, root = make_mesh(config.tensor_parallel_size), process_root(config)
        if mesh.local_devices[0].platform == "cpu" and cpu_refused() is None:
            keep_kernels(root)
        return cls(mesh, link, root)

    @property
    def platform(self) -> str:
        return str(self.mesh.devices.flat[0].platform)

    def __str__(self) -> str:
        return f"{self.mesh.devices.size} {self.mesh.devices.flat[0].device_kind}"

    def agree[T](self, value: T) -> T:
        """Process 0's value."""
        agreed: T = self.link.agree(value, lambda values: values[0])
        return agreed

    def check_equal(self, value: str, field: str, reason: str) -> None:
        """Checks that all processes have the same value.

        Raises:
            InvalidArgument: one differs.
        """
        self.link.agree(value, _equal(field, reason))

    def wait_for_all(self) -> None:
        """Waits until all processes are ready. From now on, the end of one is noticed immediately."""
        self.agree(None)
        if isinstance(self.link, Leader):
            self.link.watch()


def connect(config: EngineConfig) -> Link:
    """Connects this process with the others of its engine, before JAX starts.

    Raises:
        InvalidArgument: an option does not fit the processes or their devices.
    """
    limit_cpu_threads(config.cpu_threads)
    if config.num_processes == 1:
        return SingleProcess()
    assert config.coordinator is not None  # as EngineConfig checks
    claim_gpu_memory(config.gpu_memory_utilization)
    join(config.coordinator, config.num_processes, config.process_id)
    if jax.device_count() != config.tensor_parallel_size:
        limit = f"must be {jax.device_count()}, all devices of the {config.num_processes} processes"
        raise InvalidArgument("tensor_parallel_size", config.tensor_parallel_size, limit)
    host = host_of(config.coordinator)
    link = Leader(host, config.num_processes) if config.process_id == 0 else Follower(host, config.process_id)
    atexit.register(link.close)
    return link


def process_root(config: EngineConfig) -> Path:
    """The root folder of the cache. If an engine has several processes, each has its own."""
    root = cache_root(config.cache_dir)
    return root / f"process-{config.process_id}-of-{config.num_processes}" if config.num_processes > 1 else root


def _equal(field: str, reason: str) -> Callable[[list[Any]], Any]:
    def first(values: list[Any]) -> Any:
        for process, value in enumerate(values):
            if value != values[0]:
                raise InvalidArgument(field, value, f"process {process} differs from process 0: {reason}")
        return values[0]

    return first
