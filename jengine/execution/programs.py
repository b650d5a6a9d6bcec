"""The table's programs: lowered from abstract values, compiled in a thread pool, saved, loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from tqdm import tqdm

from jengine.execution.kv_cache import Cache
from jengine.execution.logits import COUNT_CHUNK, count_tokens
from jengine.execution.program_store import ProgramStore
from jengine.execution.sampler import make_sampler, make_scorer
from jengine.execution.slots import SlotState
from jengine.execution.spec import ExecutionSpec
from jengine.execution.trunk import make_trunk
from jengine.observe.compiles import retrieval_count
from jengine.parallel.mesh import spread
from jengine.program_table import SamplerKey, ScoreKey, TrunkKey

ALLOCATE: Literal["allocate"] = "allocate"
ALLOCATE_COUNTS: Literal["allocate-counts"] = "allocate-counts"
COUNT: Literal["count"] = "count"
Key = TrunkKey | SamplerKey | ScoreKey | Literal["allocate", "allocate-counts", "count"]


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes of a program on one device, as XLA reports them."""

    arguments: int
    outputs: int
    aliased: int  # outputs that are written over donated arguments
    temporaries: int


class Programs:
    """Every program of the table, ready to call.

    Attributes:
        compiled: how many were compiled by this process.
        loaded: how many came from the store.
        memory: by program.
        costs: measured seconds of each trunk, by name, where warm-up has noted them.
    """

    def __init__(self, spec: ExecutionSpec, store: ProgramStore | None, *, threads: int, progress: bool) -> None:
        self._store = store
        keys = program_keys(spec)
        found, notes = store.load() if store else ({}, {})
        self._programs: dict[Key, Any] = {key: found[_file_name(key)] for key in keys if _file_name(key) in found}
        self.loaded = len(self._programs)
        self._missing = missing = [key for key in keys if key not in self._programs]
        self.compiled = len(missing)
        # The largest first: they take longest, and if memory is short it shows at once.
        missing.sort(key=lambda key: -spec.table.tokens(key) if isinstance(key, TrunkKey) else 0)
        retrieved = retrieval_count()
        with ThreadPoolExecutor(threads, "compile") as pool:
            jobs = pool.map(lambda key: (key, lower(spec, key).compile()), missing)
            for key, program in tqdm(jobs, "compiling", len(missing), unit="program", disable=not progress or not missing, leave=False):
                self._programs[key] = program
        self._savable = bool(missing) and retrieval_count() == retrieved
        self.memory: dict[Key, ProgramMemory] = {}
        for key in keys:
            noted = notes.get("memory", {}).get(str(key)) if key not in missing else None
            self.memory[key] = ProgramMemory(**noted) if noted else _memory(self._programs[key])
        self.costs: dict[str, float] = notes.get("costs", {}) if not missing else {}

    def __getitem__(self, key: Key) -> Any:
        return self._programs[key]

    def save(self) -> None:
        """Keep what was compiled, with what warm-up measured, for the next start. Warns where that cannot be written.

        Where JAX's own compilation cache is on and had some of it, nothing is kept: what it gives cannot be serialized again.
        """
        if self._store and self._savable:
            notes = {"memory": {str(k): asdict(m) for k, m in self.memory.items()}, "costs": self.costs}
            try:
                self._store.save({_file_name(key): self._programs[key] for key in self._missing}, notes)
            except OSError as error:
                warnings.warn(
                    f"compiled programs could not be saved, the next start compiles them again: {error}", RuntimeWarning, stacklevel=2
                )


def open_store(spec: ExecutionSpec, root: Path) -> ProgramStore:
    return ProgramStore(root, spec.fingerprint(), spec.num_pages, spec.facts(), spec.mesh.devices.flatten().tolist())


def program_keys(spec: ExecutionSpec) -> list[Key]:
    table = spec.table
    return [ALLOCATE, ALLOCATE_COUNTS, COUNT, *table.trunks(), *table.samplers(), *table.scores()]


def lower(spec: ExecutionSpec, key: Key) -> jax.stages.Lowered:
    """A program's lowering from abstract values alone; nothing is closed over."""
    cache_out = jax.tree.map(lambda x: x.sharding, spec.cache)
    slots_out = jax.tree.map(lambda x: x.sharding, spec.slots)
    everywhere = spec.replicated
    if isinstance(key, TrunkKey):
        trunk = make_trunk(spec.model, key, spec.table, spec.page_size, spec.mesh.devices.flat[0])
        args: tuple[Any, ...] = spec.params, spec.cache, spec.slots, spec.packed(key)
        cache_specs = jax.tree.map(lambda x: x.sharding.spec, spec.cache)
        return _lower(spec, trunk, f"trunk_{key.rows}_{key.tiles}_{key.pages}", args, (cache_specs, *[PartitionSpec()] * 3), (1, 2))
    if isinstance(key, SamplerKey):
        sampler = make_sampler(spec.model, key.variant)
        state, masks = (spec.slots.last_token, ()) if key.variant != "full" else ((spec.slots.last_token, spec.counts), (spec.mask(key),))
        args = spec.params, state, spec.slots.sampling, spec.to_sample(key), *masks
        return _lower(spec, sampler, f"sampler_{key.rows}_{key.variant}", args, PartitionSpec(), (1,))
    if isinstance(key, ScoreKey):
        scorer = make_scorer(spec.model, spec.table.tile_size)
        return _lower(spec, scorer, f"score_{key.tiles}", (spec.params, *spec.to_score(key)), PartitionSpec())
    if key == COUNT:
        packed = jax.ShapeDtypeStruct((3 + COUNT_CHUNK,), jnp.int32, sharding=everywhere)
        return jax.jit(count_tokens, donate_argnums=0, out_shardings=everywhere).lower(spec.counts, packed)
    if key == ALLOCATE_COUNTS:
        return jax.jit(lambda: jnp.zeros(spec.counts.shape, spec.counts.dtype), out_shardings=everywhere).lower()

    def allocate() -> tuple[Cache, SlotState]:
        zeros: tuple[Cache, SlotState] = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (spec.cache, spec.slots))
        return zeros

    return jax.jit(allocate, out_shardings=(cache_out, slots_out)).lower()


def _lower(
    spec: ExecutionSpec, function: Callable[..., Any], name: str, args: tuple[Any, ...], out_specs: Any, donated: tuple[int, ...] = ()
) -> jax.stages.Lowered:
    function = spread(spec.mesh, function, args, out_specs)
    function.__name__ = function.__qualname__ = name  # shown in profiles
    return jax.jit(function, donate_argnums=donated).lower(*args)


def _file_name(key: Key) -> str:
    if isinstance(key, TrunkKey):
        return f"trunk-{key.rows}-{key.tiles}-{key.pages}"
    if isinstance(key, ScoreKey):
        return f"score-{key.tiles}"
    return f"sampler-{key.rows}-{key.variant}" if isinstance(key, SamplerKey) else key


def _memory(program: Any) -> ProgramMemory:
    facts = program.memory_analysis()
    return ProgramMemory(facts.argument_size_in_bytes, facts.output_size_in_bytes, facts.alias_size_in_bytes, facts.temp_size_in_bytes)
