"""The table's programs: lowered from abstract values, compiled in a thread pool, saved and loaded."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from jengine.base.compiles import announced, retrieval_count
from jengine.base.progress import Progress, progress_bar
from jengine.execution.batch_invariance import DETERMINISTIC
from jengine.execution.cache_folders import folder_name
from jengine.execution.kernels import prepare
from jengine.execution.kinds import KINDS, Key, kind_of
from jengine.execution.memory import ProgramMemory
from jengine.execution.prebuilt_programs import PrebuiltPrograms
from jengine.execution.priority import lower_priority
from jengine.execution.program_cache import Loaded, ProgramCache
from jengine.execution.quick_call import QuickCall
from jengine.execution.spec import ExecutionSpec
from jengine.parallel.mesh import shard_mapped
from jengine.table.ready_programs import by_use, first_needed
from pallas_kernels.devices import batch_invariant

CompilerOptions = dict[str, str | bool]  # XLA's
UNTUNED: CompilerOptions = {
    "xla_gpu_enable_triton_gemm": False
}  # without autotuning on a GPU, cuBLASLt's products are faster than Triton's
# XLA's default (jax 0.12) and COLLECTIVES, so a step of several devices stays one command buffer.
WHOLE: CompilerOptions = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES"
    )
}


class Programs:
    """Programs of the table, ready to call.

    Args:
        first: the programs to start with; `obtain` adds others. None: all.

    Attributes:
        compiled: number of programs compiled by this process.
        loaded: number of programs loaded from the store.
        memory: memory of each program.
    """

    def __init__(
        self,
        spec: ExecutionSpec,
        store: ProgramCache | PrebuiltPrograms | None,
        *,
        threads: int,
        progress: Progress,
        first: Sequence[Key] | None = None,
    ) -> None:
        self.spec, self._store, self._threads = spec, store, threads
        self._identity, self._devices = spec.identity(), spec.mesh.devices.flatten().tolist()
        self._programs: dict[Key, Any] = {}
        self.memory: dict[Key, ProgramMemory] = {}
        self.compiled = self.loaded = 0
        # Kernels are compiled while programs without them are.
        with ThreadPoolExecutor(1, "kernels") as pool:
            self._kernels = pool.submit(prepare, spec)
            self.obtain(program_keys(spec) if first is None else first, progress=progress)
            self._kernels.result()

    def obtain(self, keys: Sequence[Key], *, progress: Progress = False, background: bool = False) -> None:
        """Loads programs, or compiles and saves them.

        Args:
            background: whether steps are running: compiles at a low priority, and does not count as
                unexpected compilation.
        """
        before = self._kernels.result
        if self._store:
            self._take(keys, *self._store.load(map(file_name, keys), self._identity, self._devices, before))
        if missing := self._missing(keys):
            cache = self._store if isinstance(self._store, ProgramCache) else None
            nothing: AbstractContextManager[Loaded] = nullcontext(({}, {}))
            with (
                cache.filling([*map(file_name, missing)], self._devices, before, progress=progress)
                if cache
                else nothing
            ) as found:
                self._take(missing, *found)
                self._compile(self._missing(keys), cache, progress, background)

    def __contains__(self, key: Key) -> bool:
        return key in self._programs

    def __getitem__(self, key: Key) -> Any:
        return self._programs[key]

    def _missing(self, keys: Sequence[Key]) -> list[Key]:
        return [key for key in keys if key not in self._programs]

    def _take(self, keys: Sequence[Key], found: dict[str, Any], notes: dict[str, Any]) -> None:
        """Adds programs by file name, with the notes saved beside them."""
        memory = notes.get("memory", {})
        for key in keys:
            if file_name(key) in found:
                program = found[file_name(key)]
                self._programs[key] = callable_of(key, program)
                self.memory[key] = (
                    ProgramMemory(**memory[str(key)]) if str(key) in memory else memory_of(program)
                )
                self.loaded += 1

    def _compile(
        self, keys: list[Key], cache: ProgramCache | None, progress: Progress, background: bool
    ) -> None:
        """Compiles programs and saves each as soon as it is compiled.

        If JAX's own compilation cache supplies a program, saving stops there, since such a program cannot be
        serialized again.
        """
        retrieved = retrieval_count()
        for built in compile_all(
            self.spec, keys, threads=self._threads, progress=progress, background=background
        ):
            self._programs[built.key] = callable_of(built.key, built.program)
            self.memory[built.key] = memory_of(built.program)
            self.compiled += 1
            if cache and retrieval_count() == retrieved:
                cache.keep(
                    file_name(built.key), built.program, self._identity, {"memory": memory_notes(self.memory)}
                )


def callable_of(key: Key, program: Any) -> Any:
    """How a compiled program is called."""
    return QuickCall(program) if kind_of(key).each_step else program


@dataclass(frozen=True, slots=True)
class Built:
    """A program compiled here, and the seconds that it took."""

    key: Key
    program: Any
    seconds: float


def compile_all(
    spec: ExecutionSpec,
    keys: list[Key],
    *,
    threads: int,
    progress: Progress,
    options: CompilerOptions | None = None,
    background: bool = False,
) -> Iterator[Built]:
    """Compiles with several threads. Yields programs as they finish.

    Those that take longest are compiled first.

    Args:
        options: XLA's compiler options, for each program.
        background: see Programs.obtain.
    """

    if spec.mesh.devices.flat[0].platform == "gpu":
        options = {**gpu_options(spec), **(options or {})}

    def build(key: Key) -> Built:
        start = time.perf_counter()
        with announced() if background else nullcontext():
            program = lower(spec, key).compile(compiler_options=options)
        return Built(key, program, time.perf_counter() - start)

    keys = sorted(keys, key=lambda key: kind_of(key).compile_effort(spec, key), reverse=True)
    with ThreadPoolExecutor(threads, "compile", initializer=lower_priority if background else None) as pool:
        building = [pool.submit(build, key) for key in keys]
        built = (done.result() for done in as_completed(building))
        try:
            yield from progress_bar(
                built, desc="compiling", total=len(keys), unit="program", show=progress if keys else False
            )
        finally:
            pool.shutdown(cancel_futures=True)


def gpu_options(spec: ExecutionSpec) -> CompilerOptions:
    """XLA's compiler options for every program of a spec on GPUs. Command buffer settings in XLA_FLAGS are
    respected.
    """
    whole = spec.mesh.size > 1 and not any(name in os.environ.get("XLA_FLAGS", "") for name in WHOLE)
    return (WHOLE if whole else {}) | (DETERMINISTIC if spec.table.batch_invariant else {})


def running(memory: dict[Key, ProgramMemory]) -> list[ProgramMemory]:
    """Memory of the programs that run while the cache exists; those that allocate it and the counts have
    ended by then.
    """
    return [used for key, used in memory.items() if kind_of(key).while_serving]


def memory_notes(memory: dict[Key, ProgramMemory]) -> dict[str, dict[str, int]]:
    """Memory as stored in a manifest."""
    return {str(key): asdict(size) for key, size in memory.items()}


def open_cache(spec: ExecutionSpec, root: Path, max_bytes: int, *, wait: bool = True) -> ProgramCache:
    """Opens the spec's folder; see ProgramCache."""
    return ProgramCache(root, folder_name(spec.fingerprint(), spec.num_pages), max_bytes=max_bytes, wait=wait)


def program_keys(spec: ExecutionSpec) -> list[Key]:
    """All keys, in the order in which a table becomes ready; see first_needed and by_use."""
    every = [key for kind in KINDS for key in kind.keys(spec)]
    keys = dict.fromkeys([*first_keys(spec), *by_use(spec.table), *every])
    return [key for key in keys if spec.stage.last or kind_of(key).everywhere]


def first_keys(spec: ExecutionSpec) -> list[Key]:
    """The first keys, whose programs can serve any request."""
    single: list[Key] = [key for kind in KINDS if kind.key is str for key in kind.keys(spec)]
    keys = [*single, *first_needed(spec.table)]
    return [key for key in keys if spec.stage.last or kind_of(key).everywhere]


def lower(spec: ExecutionSpec, key: Key) -> jax.stages.Lowered:
    """Lowers a program from abstract values alone, without closures over arrays."""
    program = kind_of(key).program(spec, key)
    function, how = program.function, {}
    if program.by_shard:
        function = shard_mapped(spec.mesh, function, program.args, program.out)
    else:
        how["out_shardings"] = jax.tree.map(partial(NamedSharding, spec.mesh), program.out)
    function.__name__ = function.__qualname__ = program.name
    device = spec.mesh.devices.flat[0]
    # kernels are lowered for this device's instruction set
    lowered_for = device if device.platform == "gpu" else None
    with jax.default_device(lowered_for), batch_invariant(spec.table.batch_invariant):
        return jax.jit(function, donate_argnums=program.donated, **how).lower(*program.args)


def file_name(key: Key) -> str:
    """The name of a program's file, without its ending."""
    return re.sub(r"[^a-z0-9]+", "-", str(key)).strip("-")


def memory_of(program: Any) -> ProgramMemory:
    sizes = program.memory_analysis()
    return ProgramMemory(
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes,
        sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes,
        sizes.generated_code_size_in_bytes,
    )
