"""The table's programs: lowered from abstract values, compiled in a thread pool, saved and loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jengine.execution.batch_invariance import DETERMINISTIC
from jengine.execution.burst import make_burst
from jengine.execution.cache_folders import folder_name
from jengine.execution.kernels import prepare
from jengine.execution.kv_cache import COPIES, Cache, fill_pages, make_copy, spill_pages
from jengine.execution.logits import COUNT_CHUNK, count_tokens
from jengine.execution.memory import ProgramMemory
from jengine.execution.pooler import make_pooler
from jengine.execution.prebuilt_programs import PrebuiltPrograms
from jengine.execution.priority import lower_priority
from jengine.execution.program_cache import Loaded, ProgramCache
from jengine.execution.sampler import make_sampler, make_scorer
from jengine.execution.slots import UPDATE_WORDS, SlotState, update_slots
from jengine.execution.spec import ExecutionSpec
from jengine.execution.trunk import make_trunk
from jengine.observe.compiles import announced, retrieval_count
from jengine.observe.progress import Progress, progress_bar
from jengine.parallel.mesh import shard_mapped
from jengine.table.pages import SWAPS
from jengine.table.program_table import VARIANTS, BurstKey, PoolKey, SamplerKey, ScoreKey, TrunkKey
from jengine.table.ready_programs import by_use, first_needed
from pallas_kernels.products import using

CompilerOptions = dict[str, str | bool]  # XLA's
ALLOCATE: Literal["allocate"] = "allocate"
ALLOCATE_COUNTS: Literal["allocate-counts"] = "allocate-counts"
COUNT: Literal["count"] = "count"
UPDATE: Literal["update"] = "update"
COPY: Literal["copy"] = "copy"
SPILL: Literal["spill"] = "spill"
FILL: Literal["fill"] = "fill"
SMALL = ALLOCATE, ALLOCATE_COUNTS, COUNT, UPDATE, COPY
SWAPPING = SPILL, FILL  # with a host tier
UNTUNED: CompilerOptions = {
    "xla_gpu_enable_triton_gemm": False
}  # without autotuning on a GPU, cuBLASLt's products are faster than Triton's
# XLA's default (jax 0.12) and COLLECTIVES, so a step of several devices stays one command buffer.
WHOLE: CompilerOptions = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES"}
Key = (
    TrunkKey
    | SamplerKey
    | ScoreKey
    | PoolKey
    | BurstKey
    | Literal["allocate", "allocate-counts", "count", "update", "copy", "spill", "fill"]
)


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
        prepare(spec)
        self.obtain(program_keys(spec) if first is None else first, progress=progress)

    def obtain(self, keys: Sequence[Key], *, progress: Progress = False, background: bool = False) -> None:
        """Loads programs, or compiles and saves them.

        Args:
            background: whether steps are running: compiles at a low priority, and does not count as unexpected
                compilation.
        """
        if self._store:
            self._take(keys, *self._store.load(map(file_name, keys), self._identity, self._devices))
        if missing := self._missing(keys):
            cache = self._store if isinstance(self._store, ProgramCache) else None
            nothing: AbstractContextManager[Loaded] = nullcontext(({}, {}))
            with cache.filling([*map(file_name, missing)], self._devices, progress=progress) if cache else nothing as found:
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
                self._programs[key] = found[file_name(key)]
                self.memory[key] = ProgramMemory(**memory[str(key)]) if str(key) in memory else memory_of(self._programs[key])
                self.loaded += 1

    def _compile(self, keys: list[Key], cache: ProgramCache | None, progress: Progress, background: bool) -> None:
        """Compiles programs and saves each as soon as it is compiled.

        If JAX's own compilation cache supplies a program, saving stops there, since such a program cannot be
        serialized again.
        """
        retrieved = retrieval_count()
        for built in compile_all(self.spec, keys, threads=self._threads, progress=progress, background=background):
            self._programs[built.key], self.memory[built.key] = built.program, memory_of(built.program)
            self.compiled += 1
            if cache and retrieval_count() == retrieved:
                cache.keep(file_name(built.key), built.program, self._identity, {"memory": memory_notes(self.memory)})


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

    Those that take longest are compiled first: the largest trunk, which also shows early whether memory suffices, and
    the full samplers.

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

    keys = _longest_first(spec, keys)
    with ThreadPoolExecutor(threads, "compile", initializer=lower_priority if background else None) as pool:
        building = [pool.submit(build, key) for key in keys]
        built = (done.result() for done in as_completed(building))
        try:
            yield from progress_bar(built, desc="compiling", total=len(keys), unit="program", show=progress if keys else False)
        finally:
            pool.shutdown(cancel_futures=True)


def _longest_first(spec: ExecutionSpec, keys: list[Key]) -> list[Key]:
    trunks = sorted((key for key in keys if isinstance(key, TrunkKey)), key=spec.table.tokens, reverse=True)
    full = sorted((key for key in keys if isinstance(key, SamplerKey) and key.variant == VARIANTS[-1]), reverse=True)
    bursts = [key for key in keys if isinstance(key, BurstKey)]
    return [*dict.fromkeys([*trunks[:1], *full, *trunks, *bursts, *keys])]


def gpu_options(spec: ExecutionSpec) -> CompilerOptions:
    """XLA's compiler options for every program of a spec on GPUs. Command buffer settings in XLA_FLAGS are respected."""
    whole = spec.mesh.size > 1 and not any(name in os.environ.get("XLA_FLAGS", "") for name in WHOLE)
    return (WHOLE if whole else {}) | (DETERMINISTIC if spec.table.batch_invariant else {})


def running(memory: dict[Key, ProgramMemory]) -> list[ProgramMemory]:
    """Memory of the programs that run while the cache exists; those that allocate it and the counts have ended by then."""
    return [used for key, used in memory.items() if key not in (ALLOCATE, ALLOCATE_COUNTS)]


def memory_notes(memory: dict[Key, ProgramMemory]) -> dict[str, dict[str, int]]:
    """Memory as stored in a manifest."""
    return {str(key): asdict(size) for key, size in memory.items()}


def open_cache(spec: ExecutionSpec, root: Path, max_bytes: int, *, wait: bool = True) -> ProgramCache:
    """Opens the spec's folder; see ProgramCache."""
    return ProgramCache(root, folder_name(spec.fingerprint(), spec.num_pages), max_bytes=max_bytes, wait=wait)


def program_keys(spec: ExecutionSpec) -> list[Key]:
    """All keys, in the order in which a table becomes ready; see first_needed and by_use."""
    return [*_small(spec), *dict.fromkeys([*first_needed(spec.table), *by_use(spec.table)])]


def first_keys(spec: ExecutionSpec) -> list[Key]:
    """The first keys, whose programs can serve any request."""
    return [*_small(spec), *first_needed(spec.table)]


def _small(spec: ExecutionSpec) -> list[Key]:
    return [*SMALL, *(SWAPPING if spec.host_pages else ())]


def lower(spec: ExecutionSpec, key: Key) -> jax.stages.Lowered:
    """Lowers a program from abstract values alone, without closures over arrays."""
    cache_out = jax.tree.map(lambda x: x.sharding, spec.cache)
    slots_out = jax.tree.map(lambda x: x.sharding, spec.slots)
    cache_specs = jax.tree.map(lambda x: x.sharding.spec, spec.cache)
    everywhere = spec.replicated
    if isinstance(key, TrunkKey):
        device, invariant = spec.mesh.devices.flat[0], spec.table.batch_invariant
        trunk = make_trunk(spec.model, spec.layout(key), spec.page_size, device, spec.attention_backend, batch_invariant=invariant)
        args: tuple[Any, ...] = spec.leaves, spec.cache, spec.slots, spec.packed(key)
        return _lower(
            spec, _of_leaves(spec, trunk), f"trunk_{key.rows}_{key.tiles}_{key.pages}", args, (cache_specs, *[PartitionSpec()] * 3), (1, 2)
        )
    if isinstance(key, BurstKey):
        burst = make_burst(spec.model, key, spec.layout(key.trunk), spec.page_size, spec.mesh.devices.flat[0], spec.attention_backend)
        args = spec.leaves, spec.cache, spec.slots, spec.packed_burst(key)
        out = cache_specs, PartitionSpec(), PartitionSpec()
        return _lower(spec, _of_leaves(spec, burst), f"burst_{key.trunk.rows}_{key.sampler.variant}_{key.trunk.pages}", args, out, (1, 2))
    if isinstance(key, SamplerKey):
        sampler = make_sampler(spec.model, key.variant)
        state, masks = (spec.slots.last, ()) if key.variant != "full" else ((spec.slots.last, spec.counts), (spec.mask(key),))
        args = spec.leaves, state, spec.slots.sampling, spec.to_sample(key), *masks
        return _lower(spec, _of_leaves(spec, sampler), f"sampler_{key.rows}_{key.variant}", args, PartitionSpec(), (1,))
    if isinstance(key, ScoreKey):
        scorer = make_scorer(spec.model, spec.table.tile_size)
        return _lower(spec, _of_leaves(spec, scorer), f"score_{key.tiles}", (spec.leaves, *spec.to_score(key)), PartitionSpec())
    if isinstance(key, PoolKey):
        return _lower(spec, make_pooler(spec.table.tile_size), f"pool_{key.tiles}", spec.to_pool(key), PartitionSpec())
    if key == COPY:
        pages = jax.ShapeDtypeStruct((COPIES,), jnp.int32, sharding=everywhere)
        copy = make_copy(spec.mesh.devices.flat[0])
        return _lower(spec, copy, "copy_pages", (spec.cache, pages, pages), cache_specs, (0,))
    if key == SPILL:
        pages = jax.ShapeDtypeStruct((SWAPS,), jnp.int32, sharding=everywhere)
        one = jax.tree.map(lambda x: x.sharding.spec, spec.page)
        return _lower(spec, spill_pages, "spill_pages", (spec.cache, pages), [one] * SWAPS)
    if key == FILL:
        pages = jax.ShapeDtypeStruct((SWAPS,), jnp.int32, sharding=everywhere)
        return _lower(spec, fill_pages, "fill_pages", (spec.cache, [spec.page] * SWAPS, pages), cache_specs, (0,))
    if key == UPDATE:
        packed = jax.ShapeDtypeStruct((UPDATE_WORDS,), jnp.int32, sharding=everywhere)
        return jax.jit(update_slots, donate_argnums=0, out_shardings=slots_out).lower(spec.slots, packed)
    if key == COUNT:
        packed = jax.ShapeDtypeStruct((3 + COUNT_CHUNK,), jnp.int32, sharding=everywhere)
        return jax.jit(count_tokens, donate_argnums=0, out_shardings=everywhere).lower(spec.counts, packed)
    if key == ALLOCATE_COUNTS:
        return jax.jit(lambda: jnp.zeros(spec.counts.shape, spec.counts.dtype), out_shardings=everywhere).lower()

    def allocate() -> tuple[Cache, SlotState]:
        zeros: tuple[Cache, SlotState] = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (spec.cache, spec.slots))
        return zeros

    return jax.jit(allocate, out_shardings=(cache_out, slots_out)).lower()


def _of_leaves(spec: ExecutionSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of the leaves of its first argument, the parameters."""
    tree = jax.tree.structure(spec.params)

    @wraps(function)
    def of_leaves(params: Sequence[jax.Array], *others: Any) -> Any:
        return function(jax.tree.unflatten(tree, params), *others)

    return of_leaves


def _lower(
    spec: ExecutionSpec, function: Callable[..., Any], name: str, args: tuple[Any, ...], out_specs: Any, donated: tuple[int, ...] = ()
) -> jax.stages.Lowered:
    function = shard_mapped(spec.mesh, function, args, out_specs)
    function.__name__ = function.__qualname__ = name  # shown in profiles
    device = spec.mesh.devices.flat[0]
    lowered_for = device if device.platform == "gpu" else None  # kernels are lowered for this device's instruction set
    with jax.default_device(lowered_for), using(dict(spec.product_forms)):
        return jax.jit(function, donate_argnums=donated).lower(*args)


def file_name(key: Key) -> str:
    if isinstance(key, TrunkKey):
        return f"trunk-{key.rows}-{key.tiles}-{key.pages}"
    if isinstance(key, ScoreKey):
        return f"score-{key.tiles}"
    if isinstance(key, PoolKey):
        return f"pool-{key.tiles}"
    if isinstance(key, BurstKey):
        return f"burst-{key.trunk.rows}-{key.sampler.variant}-{key.trunk.pages}-{key.steps}"
    return f"sampler-{key.rows}-{key.variant}" if isinstance(key, SamplerKey) else key


def memory_of(program: Any) -> ProgramMemory:
    sizes = program.memory_analysis()
    return ProgramMemory(
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes,
        sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes,
        sizes.generated_code_size_in_bytes,
    )
