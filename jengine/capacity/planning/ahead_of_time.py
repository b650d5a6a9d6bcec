"""Compiles the table without an engine, from a model's configuration alone, for the local device or for
absent GPUs.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jengine.base.errors import InvalidArgument, OutOfMemory
from jengine.base.progress import progress_log
from jengine.core.config import EngineConfig
from jengine.devices.device_defaults import limit_cpu_threads, sizes
from jengine.devices.device_spec import DeviceSpec, device_spec
from jengine.engine.setup.model_source import ModelSource
from jengine.engine.setup.shapes import describe
from jengine.engine.setup.stages_and_ranks import refuse_stages
from jengine.execution.cache_folders import cache_root
from jengine.execution.kernel_objects import keep_lowered
from jengine.execution.kernels import product_forms, with_forms
from jengine.execution.kinds import KINDS, Key
from jengine.execution.memory import (
    PAGE_GRID,
    DeviceMemory,
    ProgramMemory,
    claim_gpu_memory,
    pages_beside,
    pages_that_fit,
)
from jengine.execution.program_store import ProgramStore, packed
from jengine.execution.programs import (
    UNTUNED,
    Built,
    CompilerOptions,
    compile_all,
    file_name,
    memory_notes,
    memory_of,
    program_keys,
    running,
)
from jengine.execution.spec import ExecutionSpec
from jengine.parallel.mesh import make_mesh
from jengine.table.program_table import TrunkKey
from pallas_kernels.compilation import ahead_of_time

AUTOTUNE = "autotune.textproto"


@dataclass(frozen=True, slots=True)
class CompiledTable:
    """The output of `compile_table`.

    Attributes:
        memory: on each device; None on a CPU.
        file_bytes, seconds: for each program.
        elapsed: total seconds; programs are compiled in parallel.
        autotune: file with this device's autotuning results.
    """

    spec: ExecutionSpec
    memory: DeviceMemory | None
    file_bytes: dict[str, int]
    seconds: dict[str, float]
    elapsed: float
    autotune: Path | None


def describe_for(config: EngineConfig, target: str | None) -> ExecutionSpec:
    """Everything except the number of pages, for the target's devices or, without a target, for the local
    ones.

    Raises:
        InvalidArgument: unknown target, or a missing package that it needs; or see `shapes.describe`.
    """
    limit_cpu_threads(config.cpu_threads)
    if config.layout.data > 1:
        limit = "must be 1: programs of several ranks are compiled at the start"
        raise InvalidArgument("data_parallel_size", config.data_parallel_size, limit)
    devices = None
    if target is not None:
        check_target(target)
        memory = device_limit(config, device_spec(target))
        try:
            devices = ahead_of_time.devices(target, config.tensor_parallel_size, memory)
        except NotImplementedError:
            raise InvalidArgument.needs_extra("target", target, "aot") from None
    claim_gpu_memory(config.gpu_memory_utilization)
    return describe_on(config, make_mesh(config.tensor_parallel_size, devices))


def describe_on(config: EngineConfig, mesh: Mesh) -> ExecutionSpec:
    """Everything except the number of pages, from the model's config.json.

    Raises:
        The errors of `shapes.describe`.
    """
    refuse_stages(config, "plans and programs that are compiled ahead")
    root, source = cache_root(config.cache_dir), ModelSource.without_weights(config)
    options, model = source.complete(config), source.config
    spec = describe(options, model, mesh, root, source.draft_config, source.vision)
    return with_forms(spec, product_forms(spec, root))


def check_target(target: str) -> None:
    """Checks the name of a target that programs are to be compiled for.

    Raises:
        InvalidArgument: unknown target, or one that can only be planned for.
    """
    known = ahead_of_time.targets()
    if target not in known:
        raise InvalidArgument(
            "target",
            target,
            f"must be one of {', '.join(known)}, for which programs can be compiled without the device",
        )


def memory_limit(config: EngineConfig, spec: ExecutionSpec, target: str | None) -> int:
    """Bytes that jengine may use on each device."""
    if target is not None:
        return device_limit(config, device_spec(target))
    return int((spec.mesh.devices.flat[0].memory_stats() or {})["bytes_limit"])


def device_limit(config: EngineConfig, device: DeviceSpec) -> int:
    """Bytes that jengine may use on a device that may be absent: what JAX would reserve there."""
    return int(device.memory * config.gpu_memory_utilization)


def largest(spec: ExecutionSpec) -> list[Key]:
    """The programs that may need the most memory beside their arguments."""
    return [key for kind in KINDS if (key := kind.heaviest(spec)) is not None]


def compile_table(
    config: EngineConfig,
    out: Path,
    *,
    target: str | None = None,
    autotune: Path | None = None,
    progress: bool = True,
) -> CompiledTable:
    """Compiles every program and writes them to a folder, for `EngineConfig.programs`.

    Args:
        out: the folder, new or empty.
        target: a GPU that need not be present, such as 'h200'; None: the local device.
        autotune: autotuning results that `compile_table` saved on a GPU of the same kind.

    Raises:
        InvalidArgument: the model or device does not support an option, or the folder is not empty.
        ModelError: the model cannot be read, or is not supported.
        OutOfMemory: the device is too small.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidArgument("out", str(out), "must be a new or an empty folder")
    start = time.perf_counter()
    spec, memory = describe_for(config, target), None
    device = spec.mesh.devices.flat[0]
    if device.platform != "cpu":
        keep_lowered(cache_root(config.cache_dir))
    arguments: dict[str, Any] = {
        "threads": sizes(config, device.platform).compile_threads,
        "progress": False,
        "options": _compiler_options(device, target, autotune),
    }
    store, file_bytes, seconds = ProgramStore(out), dict[str, int](), dict[str, float]()
    used: dict[Key, ProgramMemory] = {}
    provisional: list[Built] = []
    first = [] if device.platform == "cpu" else largest(spec)
    # the others do not have the cache's shape, and are compiled again
    others = [key for key in first if not isinstance(key, TrunkKey)]
    missing = [key for key in program_keys(spec) if key not in others]
    with progress_log(len(first) + len(missing), doing="compiling", unit="program", show=progress) as count:
        if device.platform == "cpu":
            spec = dataclasses.replace(spec, num_pages=pages_that_fit(config, spec))
        else:  # the programs' memory does not depend on the number of pages
            for built in compile_all(dataclasses.replace(spec, num_pages=PAGE_GRID), [*first], **arguments):
                provisional.append(built)
                count()
            memory = DeviceMemory.of(
                memory_limit(config, spec, target), spec, [memory_of(built.program) for built in provisional]
            )
            spec = dataclasses.replace(spec, num_pages=pages_beside(config, spec, memory))
        done = [built for built in provisional if built.key in others]
        for built in chain(done, compile_all(spec, missing, **arguments)):
            file_bytes[str(built.key)] = store.add(
                file_name(built.key), packed(built.program, device.platform)
            )
            seconds[str(built.key)], used[built.key] = round(built.seconds, 2), memory_of(built.program)
            if built.key not in others:
                count()
    if memory is not None:
        memory = DeviceMemory.of(memory.limit, spec, running(used))
        _check(spec, memory)
    notes: dict[str, Any] = {"memory": memory_notes(used), "bytes": file_bytes, "compile_seconds": seconds}
    store.finish(spec.identity(), notes)
    results = None if target is not None or device.platform == "cpu" else _save_autotuning(device, out)
    return CompiledTable(spec, memory, file_bytes, seconds, time.perf_counter() - start, results)


def _check(spec: ExecutionSpec, memory: DeviceMemory) -> None:
    """Checks that there is room with all programs, since the number of pages was derived from only a few."""
    need = spec.num_pages * memory.page + memory.beside
    if need > memory.limit:
        sizes = (
            f"{spec.num_pages} pages, weights and programs need {need / 2**30:.1f} GiB of"
            f" {memory.limit / 2**30:.1f} GiB"
        )
        raise OutOfMemory(f"no room for the KV cache: {sizes}")


def _compiler_options(device: jax.Device, target: str | None, results: Path | None) -> CompilerOptions:
    """Options for products tuned by these results, tuned on the local device, or not tuned. XLA reads results
    once per process."""
    if results is None:
        return {} if target is None else UNTUNED
    if device.platform == "cpu":
        raise InvalidArgument("autotune", str(results), "XLA does not autotune for CPUs")
    options: CompilerOptions = {"xla_gpu_load_autotune_results_from": str(results)}
    try:
        _compile_little(device, options)  # here rather than in the pool's threads, to report errors
    except jax.errors.JaxRuntimeError as error:
        raise InvalidArgument(
            "autotune", str(results), f"cannot be read: {str(error).splitlines()[0]}"
        ) from None
    return options


def _save_autotuning(device: jax.Device, out: Path) -> Path | None:
    """Saves all autotuning results of this process. XLA writes them whenever it compiles."""
    file = out / AUTOTUNE
    _compile_little(device, {"xla_gpu_dump_autotune_results_to": str(file)})
    return file if file.exists() else None


def _compile_little(device: jax.Device, options: CompilerOptions) -> None:
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    jax.jit(lambda x: x + 1).lower(scalar).compile(compiler_options=options)
