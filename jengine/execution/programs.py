"""The table's programs: lowered from abstract values, compiled in a thread pool, saved and loaded."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import pxla  # JAX has no public way to call an executable
from jax.sharding import NamedSharding

from jengine.base.compiles import announced, retrieval_count
from jengine.base.progress import Progress, progress_bar
from jengine.execution.cache_folders import folder_name
from jengine.execution.compile_children import CompileChildren, Job
from jengine.execution.kernels import prepare
from jengine.execution.kinds import KINDS, Key, kind_of
from jengine.execution.memory import ProgramMemory
from jengine.execution.program_cache import POLL, WAITING, ProgramCache
from jengine.execution.program_store import PrebuiltPrograms, packed, unpacked
from jengine.execution.spec import DETERMINISTIC, ExecutionSpec
from jengine.parallel.mesh import shard_mapped
from jengine.table.ready_programs import by_use, first_needed
from pallas_kernels.compilation.lowered import reused
from pallas_kernels.devices import batch_invariant

log = logging.getLogger("jengine")
CompilerOptions = dict[str, str | bool | int]  # XLA's
Running = Callable[[], bool]
# Without a GPU there is nothing to tune on, but XLA would compile what it could try, which takes half of the
# time. Untuned, cuBLASLt's products are faster than Triton's.
UNTUNED: CompilerOptions = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
# XLA's default and COLLECTIVES, so a step of several devices stays one command buffer. Since jax 0.12 that
# holds XLA's kernels for small sums over NVLink, too; jax 0.11 launches each alone, so there NCCL does all.
_BUFFER = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES"
WHOLE: CompilerOptions = (
    {"xla_gpu_enable_command_buffer": f"{_BUFFER},COLLECTIVES_KERNEL"}
    if jax.__version_info__ >= (0, 12)
    else {"xla_gpu_enable_command_buffer": _BUFFER, "xla_gpu_experimental_use_collective_kernels": ""}
)


NICENESS = 10


class Programs:
    """Programs of the table, ready to call.

    Args:
        children: processes that compile in place of this one; None: threads of this one do.
        first: the programs to start with; `obtain` adds others. None: all.

    Attributes:
        compiled: number of programs compiled for this start, here or by other processes.
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
        children: CompileChildren | None = None,
    ) -> None:
        self.spec, self._store, self._threads, self._children = spec, store, threads, children
        self._identity, self._devices = spec.identity(), spec.mesh.devices.flatten().tolist()
        self._programs: dict[Key, Any] = {}
        self.memory: dict[Key, ProgramMemory] = {}
        self.compiled = self.loaded = 0
        # Kernels are compiled while programs without them are.
        with ThreadPoolExecutor(1, "kernels") as pool:
            self._kernels = pool.submit(prepare, spec)
            deque(self.obtain(program_keys(spec) if first is None else first, progress=progress), maxlen=0)
            self._kernels.result()

    def obtain(
        self, keys: Sequence[Key], *, progress: Progress = False, running: Running | None = None
    ) -> Generator[Key]:
        """Loads programs, or has them compiled and saves them. Yields each key as soon as its program can be
        called.

        Args:
            running: given while steps run: whether to go on. Then threads that compile have a low priority,
                compilations do not count as unexpected, and a program that cannot be compiled is left out.
        """
        yield from self._load(keys)
        cache = self._store if isinstance(self._store, ProgramCache) else None
        if not (missing := self._missing(keys)):
            return
        if cache is None:
            yield from self._compile(missing, None, progress, running)
            return
        with progress_bar(show=progress, total=len(missing), desc=WAITING, unit="program", delay=POLL) as bar:
            while not (held := cache.hold()) and missing and cache.expects(map(file_name, missing)):
                if running is not None and not running():
                    return
                time.sleep(POLL)
                for key in self._load(missing):
                    bar.n += 1
                    yield key
                bar.refresh()
                missing = self._missing(missing)
        try:
            yield from self._load(missing)  # programs saved last
            cache.begin()
            yield from self._compile(self._missing(missing), cache, progress, running)
            cache.end()
        finally:
            if held:
                cache.release()

    def prefer(self, keys: Sequence[Key]) -> None:
        """Prefers these programs, as CompileChildren does. Threads keep their order."""
        if self._children is not None:
            self._children.prefer(keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._programs

    def __getitem__(self, key: Key) -> Any:
        return self._programs[key]

    def _missing(self, keys: Sequence[Key]) -> list[Key]:
        return [key for key in keys if key not in self._programs]

    def _load(self, keys: Sequence[Key]) -> Iterator[Key]:
        """Adds saved programs."""
        if self._store is None:
            return
        by_name = {file_name(key): key for key in self._missing(keys)}
        for name, program in self._store.load(by_name, self._identity, self._devices, self._kernels.result):
            key = by_name[name]
            sizes = self._store.notes.get("memory", {}).get(str(key))
            self._add(key, program, memory_of(program) if sizes is None else ProgramMemory(**sizes))
            self.loaded += 1
            yield key

    def _add(self, key: Key, program: Any, memory: ProgramMemory) -> None:
        self._programs[key], self.memory[key] = callable_of(key, program), memory

    def _compile(
        self, keys: list[Key], cache: ProgramCache | None, progress: Progress, running: Running | None
    ) -> Iterator[Key]:
        """Compiles programs, and saves each as soon as it is compiled. Where other processes do not do it,
        this one does, unless steps run and the others can compile some.
        """
        if self._children is not None and self._children.works:
            yield from self._compile_elsewhere(self._children, keys, cache, progress, running)
            missing = self._missing(keys)
            some = self._children.works and len(missing) < len(keys)
            if running is not None and (some or not running()):
                return
            keys = missing
        retrieved = retrieval_count()
        for built in compile_all(
            self.spec,
            keys,
            threads=self._threads if running is None else max(self._threads // 2, 1),
            progress=progress,
            background=running is not None,
        ):
            self._add(built.key, built.program, memory_of(built.program))
            self.compiled += 1
            # a program that JAX's own compilation cache has supplied cannot be serialized again
            if cache is not None and cache.writes and retrieval_count() == retrieved:
                self._keep(built.key, packed(built.program, self._devices[0].platform), cache)
            yield built.key

    def _compile_elsewhere(
        self,
        children: CompileChildren,
        keys: list[Key],
        cache: ProgramCache | None,
        progress: Progress,
        running: Running | None,
    ) -> Iterator[Key]:
        """Adds and saves what other processes compile. Leaves out what they cannot."""
        job = Job.of(self.spec, children.target)
        if running is None:
            keys = by_effort(self.spec, keys)
        left = {children.compile(job, key): key for key in keys}
        with progress_bar(show=progress, total=len(keys), desc="compiling", unit="program") as bar:
            while left and (running is None or running()):
                for done in wait(left, POLL, FIRST_COMPLETED).done:
                    key = left.pop(done)
                    bar.update()
                    try:
                        result = done.result()
                        self._kernels.result()
                        program = unpacked(result.data, self._devices)
                    except Exception as error:  # the runtime raises various errors
                        if children.works:
                            log.warning("%s was not compiled by another process: %s", key, error)
                        continue
                    self._add(key, program, result.memory)
                    self.compiled += 1
                    if cache is not None:
                        self._keep(key, result.data, cache)
                    yield key

    def _keep(self, key: Key, data: bytes, cache: ProgramCache) -> None:
        coming = [*map(file_name, self._missing(program_keys(self.spec)))]
        cache.keep(file_name(key), data, self._identity, memory_notes({key: self.memory[key]}), coming)


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

    Args:
        options: XLA's compiler options, for each program.
        background: whether steps are running: in the order of the keys, at a low priority, without counting
            as unexpected compilation. A program that fails is left out, and no other is begun before the
            caller asks for the next one. Otherwise, those that take longest are compiled first.
    """

    def build(key: Key) -> Built:
        with announced() if background else nullcontext():
            return compile_one(spec, key, options)

    waiting = iter(keys if background else by_effort(spec, keys))
    with ThreadPoolExecutor(threads, "compile", initializer=lower_priority if background else None) as pool:

        def results() -> Iterator[Built]:
            building = dict[Future[Built], Key]()
            while True:
                for key in islice(waiting, threads - len(building) if background else None):
                    building[pool.submit(build, key)] = key
                if not building:
                    return
                done = next(as_completed(building))
                key = building.pop(done)
                if background and (error := done.exception()) is not None:
                    log.warning("%s could not be compiled, the engine continues without it: %s", key, error)
                    continue
                yield done.result()

        try:
            yield from progress_bar(
                results(), desc="compiling", total=len(keys), unit="program", show=progress if keys else False
            )
        finally:
            pool.shutdown(cancel_futures=True)


def compile_one(spec: ExecutionSpec, key: Key, options: CompilerOptions | None = None) -> Built:
    """Lowers and compiles a program. options: XLA's, beside those that all programs of the spec have."""
    start = time.perf_counter()
    if spec.mesh.devices.flat[0].platform == "gpu":
        options = {**gpu_options(spec), **(options or {})}
    program = lower(spec, key).compile(compiler_options=options)
    return Built(key, program, time.perf_counter() - start)


def by_effort(spec: ExecutionSpec, keys: Sequence[Key]) -> list[Key]:
    """The keys of the programs that take longest to compile first."""
    return sorted(keys, key=lambda key: kind_of(key).compile_effort(spec, key), reverse=True)


def gpu_options(spec: ExecutionSpec) -> CompilerOptions:
    """XLA's options for every program of a spec on GPUs. Command buffer settings in XLA_FLAGS hold."""
    whole = spec.mesh.size > 1 and not any(name in os.environ.get("XLA_FLAGS", "") for name in WHOLE)
    return (WHOLE if whole else {}) | (DETERMINISTIC if spec.table.batch_invariant else {})


def running(memory: dict[Key, ProgramMemory]) -> list[ProgramMemory]:
    """Memory of the programs that run while the cache exists: all but those that allocate."""
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
    return of_stage(spec, dict.fromkeys([*first_keys(spec), *by_use(spec.table), *every]))


def first_keys(spec: ExecutionSpec) -> list[Key]:
    """The first keys, whose programs can serve any request."""
    single: list[Key] = [key for kind in KINDS if kind.key is str for key in kind.keys(spec)]
    return of_stage(spec, [*single, *first_needed(spec.table)])


def of_stage(spec: ExecutionSpec, keys: Iterable[Key]) -> list[Key]:
    """The keys whose programs a stage has."""
    return [key for key in keys if spec.stage.last or kind_of(key).everywhere]


def lower(spec: ExecutionSpec, key: Key) -> jax.stages.Lowered:
    """Lowers a program from abstract values alone, without closures over arrays."""
    program = kind_of(key).program(spec, key)
    function, shardings = program.function, {}
    if program.by_shard:
        function = shard_mapped(spec.mesh, function, program.args, program.out)
    else:
        shardings["out_shardings"] = jax.tree.map(partial(NamedSharding, spec.mesh), program.out)
    function.__name__ = function.__qualname__ = program.name
    device = spec.mesh.devices.flat[0]
    gpu = device.platform == "gpu"
    # what is traced asks the default device for which one it is
    place = jax.default_device(device if gpu or jax.default_backend() != "cpu" else None)
    kernels = reused() if gpu else nullcontext()
    # random numbers depend neither on the process's options nor on the batch
    with place, kernels, batch_invariant(spec.table.batch_invariant), jax.threefry_partitionable(True):
        return jax.jit(function, donate_argnums=program.donated, **shardings).lower(*program.args)


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


def lower_priority() -> None:
    """Lowers this thread's priority permanently, on systems with priorities per thread."""
    if hasattr(os, "setpriority") and hasattr(os, "sched_getaffinity"):  # Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class QuickCall:
    """A program whose arguments always have the shapes, dtypes and shardings that it was compiled for.

    A trunk has hundreds of arguments, the weights. In every call, `jax.stages.Compiled` compares the type and
    layout of each with what was compiled, a third of the host's time of a step on a GPU. Here only the first
    call does that.

    Args:
        program: has neither effects nor callbacks. Its first call here compares all arguments, as usual.

    Attributes:
        program: the same.
    """

    def __init__(self, program: jax.stages.Compiled) -> None:
        executable: Any = program._executable
        run = executable.unsafe_call
        self.program, self._compared = program, False
        self._execute, self._handlers = run.xla_executable.execute_sharded, run.out_handler.handlers
        self._out_tree = program.out_tree
        self._kept = sorted(run.kept_var_idx)  # XLA removes arguments that are not used
        kinds = zip(self._kept, executable.in_avals, executable._in_shardings, strict=True)
        self._kinds = {
            i: (like, where, where.addressable_devices_indices_map(like.shape)) for i, like, where in kinds
        }

    def __call__(self, weights: Sequence[jax.Array], *others: Any) -> Any:
        """The program's results.

        Args:
            weights: a flat sequence.
            others: trees of arrays, on the program's devices or the host.

        Raises:
            TypeError: an array on the host has another shape or dtype than the program was compiled for.
        """
        if not self._compared:
            outs = self.program(weights, *others)
            self._compared = True
            return outs
        flat = [*weights]
        for i, array in enumerate(jax.tree.leaves(others), len(flat)):
            flat.append(self._placed(i, array) if type(array) is np.ndarray else array)
        if len(self._kept) < len(flat):
            flat = [flat[i] for i in self._kept]
        return jax.tree.unflatten(self._out_tree, self._execute(flat).consume_with_handlers(self._handlers))

    def _placed(self, number: int, array: np.ndarray) -> Any:
        """An argument from the host, on the program's devices."""
        if number not in self._kinds:
            return array
        like, sharding, parts = self._kinds[number]
        if array.shape != like.shape or array.dtype != like.dtype:
            shape, expected = (f"{each.dtype}{[*each.shape]}" for each in (array, like))
            raise TypeError(f"argument {number} is {shape}; the program takes {expected}")
        return pxla.batched_device_put(like, sharding, [array[part] for part in parts.values()], [*parts])
