"""The devices that share an engine's model: their mesh, and the link between their processes."""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.devices.cpu_threads import limit_cpu_threads
from jengine.execution.cache_folders import cache_root
from jengine.execution.kernel_objects import keep_kernels
from jengine.execution.memory import claim_gpu_memory
from jengine.parallel.link import Follower, Leader, Link, SingleProcess, host_of, join
from jengine.parallel.mesh import make_mesh, one_axis
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
    def take(cls, config: EngineConfig, link: Link, mesh: Mesh | None = None) -> Devices:
        """The devices of the caller's mesh, or the first ones. Starts JAX.

        Raises:
            InvalidArgument: there are too few, or the mesh does not fit the options or an engine.
        """
        mesh = make_mesh(config.tensor_parallel_size) if mesh is None else one_axis(mesh)
        if mesh.size != config.tensor_parallel_size:
            raise InvalidArgument(
                "tensor_parallel_size",
                config.tensor_parallel_size,
                f"must be {mesh.size}, the devices of mesh",
            )
        root = process_root(config)
        if mesh.local_devices[0].platform == "cpu" and cpu_refused() is None:
            keep_kernels(root)
        return cls(mesh, link, root)

    def agree(self, value: Any) -> Any:
        """Process 0's value."""
        return self.link.agree(value, lambda values: values[0])


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
    return (
        root / f"process-{config.process_id}-of-{config.num_processes}" if config.num_processes > 1 else root
    )
