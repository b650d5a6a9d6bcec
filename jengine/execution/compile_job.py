"""What another process needs to compile the programs of a spec: the spec as bytes, its devices by their
numbers.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jengine.execution.cache_folders import folder_name
from jengine.execution.memory import ProgramMemory
from jengine.execution.prebuilt_programs import difference
from jengine.execution.spec import ExecutionSpec

# JAX's options that change how programs are lowered and compiled
OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


@dataclass(frozen=True, slots=True)
class Target:
    """GPUs of one host to compile for, which the compiling process does not touch.

    Attributes:
        memory: see `ahead_of_time.devices`.
    """

    name: str
    count: int
    memory: int

    def devices(self) -> list[jax.Device]:
        from pallas_kernels.compilation import ahead_of_time  # imports Mosaic

        return ahead_of_time.devices(self.name, self.count, self.memory)

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> Target | None:
        """That of GPUs that are present; None: programs for them cannot be compiled without them."""
        from pallas_kernels.compilation import ahead_of_time  # imports Mosaic

        name = ahead_of_time.target_of(devices[0])
        limit = (devices[0].memory_stats() or {}).get("bytes_limit")
        if name is None or limit is None:
            return None
        return cls(name, 1 + max(device.id for device in devices), limit)


class Job(NamedTuple):
    """A spec, for other processes.

    Attributes:
        name: of the spec.
    """

    name: str
    data: bytes

    @classmethod
    def of(cls, spec: ExecutionSpec, target: Target | None) -> Job:
        """Args:
        target: that of the spec's devices; None: the other process has the same devices, a CPU's.
        """
        options = {name: jax.config.values[name] for name in OPTIONS}
        with io.BytesIO() as file:
            pickle.dump((target, options, _plain(spec)), file)
            _Pickler(file).dump(dataclasses.replace(spec))  # without what the spec has computed
            return cls(folder_name(spec.fingerprint(), spec.num_pages), file.getvalue())

    def read(self) -> tuple[ExecutionSpec, Target | None]:
        """The spec on this process's devices or those of its target. Sets JAX's options.

        Raises:
            ValueError: programs that this process compiles would not be those of the spec.
        """
        with io.BytesIO(self.data) as file:
            target, options, identity = pickle.load(file)
            for name, value in options.items():
                jax.config.update(name, value)
            spec = _Unpickler(file, jax.devices() if target is None else target.devices()).load()
        different = difference(identity, _plain(spec))
        if different is not None:
            raise ValueError(f"this process cannot compile them: {different}")
        return spec, target


class Compiled(NamedTuple):
    """A program that another process has compiled.

    Attributes:
        data: see `program_store.packed`.
    """

    data: bytes
    memory: ProgramMemory
    seconds: float


def _plain(spec: ExecutionSpec) -> dict[str, Any]:
    identity: dict[str, Any] = json.loads(json.dumps(spec.identity(), default=list))
    return identity


class _Pickler(pickle.Pickler):
    """Pickles meshes by the numbers of their devices."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Mesh):
            numbers = np.vectorize(lambda device: device.id)(obj.devices).tolist()
            return numbers, obj.axis_names, [kind.name for kind in obj.axis_types]
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, devices: Sequence[jax.Device]) -> None:
        super().__init__(file)
        self._devices = {device.id: device for device in devices}

    def persistent_load(self, pid: Any) -> Mesh:
        numbers, names, kinds = pid
        devices = np.vectorize(lambda number: self._devices[number], otypes=[object])(numbers)
        return Mesh(devices, names, axis_types=tuple(AxisType[kind] for kind in kinds))
