"""Owns the device state and makes the calls that change it. Calls are plain data, so other processes can repeat them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import msgspec
import numpy as np

from jengine.execution.host_store import HostStore
from jengine.execution.kv_cache import Page
from jengine.execution.logits import ALL_ALLOWED, mask_words
from jengine.execution.memory import device_bytes
from jengine.execution.programs import ALLOCATE, ALLOCATE_COUNTS, COPY, COUNT, FILL, SPILL, UPDATE, Programs
from jengine.execution.sampler import Sampled, SampledLogprobs
from jengine.execution.spec import ExecutionSpec
from jengine.execution.trunk import ToSample
from jengine.models import Params
from jengine.table.program_table import BurstKey, PoolKey, SamplerKey, ScoreKey, TrunkKey


class Call(NamedTuple):
    """An operation on the devices.

    - trunk: runs the key's trunk on its packed batch
    - score: scores the last trunk's tiles, array int32 [tiles * tile_size] of the tokens that follow
    - pool: pools the last trunk's tiles, array int32 [tiles, 2] of each tile's start and end, see pooler.make_pooler
    - burst: runs the key's steps on its packed batch and lengths
    - sample: samples the last trunk's rows, with a token mask uint32 [sampler rows, words], see
      logits.mask_words; None: all allowed
    - update: applies slot updates that do not fit into a trunk's batch, see slots.pack_updates
    - copy: copies pages, array int32 [2, COPIES] of sources and targets
    - spill: copies pages to the host, array int32 [2, SWAPS] of pages and host pages
    - stage: copies host pages to the device, array int32 [2, n] of host pages and places
    - fill: copies staged pages into the cache, array int32 [2, SWAPS] of places and pages
    - count: counts a chunk of a sequence's tokens, see logits.count_tokens
    - forget: frees the counts
    """

    what: Literal["trunk", "score", "pool", "burst", "sample", "update", "copy", "spill", "stage", "fill", "count", "forget"]
    key: TrunkKey | ScoreKey | PoolKey | BurstKey | SamplerKey | None = None
    array: np.ndarray | None = None


_KEYS: dict[str, type] = {"trunk": TrunkKey, "score": ScoreKey, "pool": PoolKey, "burst": BurstKey, "sample": SamplerKey}


def encode(call: Call) -> bytes:
    array = None if call.array is None else (call.array.dtype.str, call.array.shape, call.array.tobytes())
    return msgspec.msgpack.encode((call.what, call.key, array))


def decode(frame: bytes) -> Call:
    what, key, array = msgspec.msgpack.decode(frame)
    kind = _KEYS.get(what)
    values = None if array is None else np.frombuffer(array[2], array[0]).reshape(array[1])
    return Call(what, None if kind is None else msgspec.convert(key, kind), values)


class Worker:
    """Weights, cache and slots, and counts once a request has needed them."""

    def __init__(self, spec: ExecutionSpec, programs: Programs, params: Params) -> None:
        self.spec, self.programs, self.params = spec, programs, params
        self._leaves = tuple(jax.tree.leaves(params))
        self.cache, self.slots = programs[ALLOCATE]()
        self.store = HostStore(spec) if spec.host_pages else None
        self._counts: jax.Array | None = None
        self._to_sample: ToSample | None = None  # output of the last trunk
        self._tiles: jax.Array | None = None
        self._local = spec.replicated.is_fully_addressable
        self._no_mask: dict[int, jax.Array] = {}  # by rows

    def memory_parts(self) -> dict[str, int]:
        """Bytes on this process's devices, by use."""
        devices = len(self.spec.mesh.local_devices)
        parts = {"weights": self.params, "cache": self.cache, "slots and counts": (self.slots, self._counts)}
        found = {name: devices * device_bytes(tree) for name, tree in parts.items()}
        memory = [*self.programs.memory.values()]
        return {
            **found,
            "programs' code": sum([program.code for program in memory]),
            "programs' temporaries, of the largest": devices * max([program.working for program in memory], default=0),
        }

    def execute(self, call: Call) -> Any:
        """Executes a call without waiting for its result.

        Returns:
            Sampled for a burst, Sampled or SampledLogprobs for a sample, SampledLogprobs for a score, an array
            for a pool, pages in transfer for a spill and a stage; otherwise None.
        """
        match call:
            case Call("trunk", TrunkKey() as key, np.ndarray() as packed):
                outs = self.programs[key](self._leaves, self.cache, self.slots, self._put(packed))
                self.cache, self.slots, self._to_sample, self._tiles = outs
                return None
            case Call("score", ScoreKey() as key, np.ndarray() as targets):
                return _on_its_way(self.programs[key](self._leaves, self._tiles, self._put(targets)))
            case Call("pool", PoolKey() as key, np.ndarray() as ranges):
                pooled = self.programs[key](self._tiles, self._put(ranges))
                pooled.copy_to_host_async()
                return pooled
            case Call("burst", BurstKey() as key, np.ndarray() as packed):
                self.cache, self.slots, sampled = self.programs[key](self._leaves, self.cache, self.slots, self._put(packed))
                return _on_its_way(sampled)
            case Call("sample", SamplerKey() as key, mask):
                return _on_its_way(self._sample(key, mask))
            case Call("update", None, np.ndarray() as packed):
                self.slots = self.programs[UPDATE](self.slots, self._put(packed))
                return None
            case Call("copy", None, np.ndarray() as pages):
                self.cache = self.programs[COPY](self.cache, *map(self._put, pages))
                return None
            case Call("spill" | "stage" | "fill" as what, None, np.ndarray() as numbers) if self.store is not None:
                return self._swap(self.store, what, *numbers.tolist())
            case Call("count", None, np.ndarray() as chunk):
                self._counts = self.programs[COUNT](self._get_counts(), self._put(chunk))
                return None
            case Call("forget"):
                self._counts = None  # allocated again when needed
                return None
        raise ValueError(f"unknown call: {call.what} with {call.key}")

    def _swap(self, store: HostStore, what: str, sources: list[int], targets: list[int]) -> list[Page] | None:
        if what == "spill":
            return store.keep(targets, self.programs[SPILL](self.cache, self._put(np.array(sources, np.int32))))
        if what == "stage":
            return store.stage(sources, targets)
        self.cache = self.programs[FILL](self.cache, store.take(sources), self._put(np.array(targets, np.int32)))
        return None

    def _sample(self, key: SamplerKey, mask: np.ndarray | None) -> Sampled | SampledLogprobs:
        program, slots = self.programs[key], self.slots
        sampled: Sampled | SampledLogprobs
        if key.variant == "full":
            state = slots.last, self._get_counts()
            allowed = self._all_allowed(key.rows) if mask is None else self._put(mask)
            (last, self._counts), sampled = program(self._leaves, state, slots.sampling, self._to_sample, allowed)
        else:
            last, sampled = program(self._leaves, slots.last, slots.sampling, self._to_sample)
        self.slots = slots._replace(last=last)
        return sampled

    def _put(self, array: np.ndarray) -> np.ndarray | jax.Array:
        """An array for all devices, as an argument of a program.

        If all devices are in this process, programs place the array themselves, which is much faster than device_put.
        """
        return array if self._local else self._everywhere(array)

    def _everywhere(self, array: np.ndarray) -> jax.Array:
        placed: jax.Array = jax.make_array_from_callback(array.shape, self.spec.replicated, array.__getitem__)
        return placed

    def _get_counts(self) -> jax.Array:
        counts: jax.Array = self.programs[ALLOCATE_COUNTS]() if self._counts is None else self._counts
        return counts

    def _all_allowed(self, rows: int) -> jax.Array:
        if rows not in self._no_mask:
            words = mask_words(self.spec.model.config.vocab_size)
            self._no_mask[rows] = self._everywhere(np.full((rows, words), ALL_ALLOWED))
        return self._no_mask[rows]


def _on_its_way(arrays: Any) -> Any:
    """Starts the copy to the host."""
    for array in arrays:
        array.copy_to_host_async()
    return arrays
