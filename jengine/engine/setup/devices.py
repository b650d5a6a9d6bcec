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
from jengine.devices.device_defaults import limit_cpu_threads
from jengine.execution.cache_folders import cache_root
from jengine.execution.kernel_objects import keep_kernels, keep_lowered
from jengine.execution.memory import claim_gpu_memory
from jengine.parallel.link import Follower, Leader, Link, SingleProcess, join
from jengine.parallel.mesh import make_mesh, one_axis, stage_meshes
from pallas_kernels.devices import cpu_refused


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices, and how this process agrees with the others that have some of them.

    Attributes:
        root: this process's root folder of the cache.
        stages: the mesh of each stage of a pipeline, or `mesh` alone, which is the first one's.
    """

    mesh: Mesh
    link: Link
    root: Path
    stages: tuple[Mesh, ...]

    @classmethod
    def take(cls, config: EngineConfig, link: Link, mesh: Mesh | None = None) -> Devices:
        """The devices of the caller's mesh, or the first ones. Starts JAX.

        Raises:
            InvalidArgument: there are too few, or the mesh does not fit the options or an engine.
        """
        count = config.pipeline_parallel_size
        if mesh is not None and count > 1:
            raise InvalidArgument(
                "mesh", mesh.devices.shape, f"must be None with pipeline_parallel_size={count}"
            )
        stages = _meshes(config) if mesh is None else [one_axis(mesh)]
        mesh = stages[0]
        if mesh.size != config.layout.stage_devices:
            raise InvalidArgument(
                "tensor_parallel_size",
                config.tensor_parallel_size,
                f"must be {mesh.size}, the devices of mesh",
            )
        root = process_root(config)
        if mesh.devices.flat[0].platform != "cpu":
            keep_lowered(root)
        elif cpu_refused() is None:
            keep_kernels(root)
        return cls(mesh, link, root, tuple(stages))

    @property
    def local(self) -> jax.Device:
        """One of this process's devices."""
        mine = jax.process_index()
        return next(
            device for mesh in self.stages for device in mesh.devices.flat if device.process_index == mine
        )

    def agree(self, value: Any) -> Any:
        """Process 0's value."""
        return self.link.agree(value, lambda values: values[0])


def _meshes(config: EngineConfig) -> list[Mesh]:
    """The mesh of each stage."""
    layout = config.layout
    return [make_mesh(layout.tensor)] if layout.devices == layout.tensor else stage_meshes(layout)


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
    if (stages := config.pipeline_parallel_size) * config.tensor_parallel_size != jax.device_count():
        limit = f"must be {jax.device_count()}, all devices of the {config.num_processes} processes"
        if stages > 1:
            limit = f"times pipeline_parallel_size={stages} {limit}"
        raise InvalidArgument("tensor_parallel_size", config.tensor_parallel_size, limit)
    host = config.coordinator.rpartition(":")[0].strip("[]")
    link = Leader(host, config.num_processes) if config.process_id == 0 else Follower(host, config.process_id)
    atexit.register(link.close)
    return link


def process_root(config: EngineConfig) -> Path:
    """The root folder of the cache. If an engine has several processes, each has its own."""
    root = cache_root(config.cache_dir)
    return (
        root / f"process-{config.process_id}-of-{config.num_processes}" if config.num_processes > 1 else root
    )
