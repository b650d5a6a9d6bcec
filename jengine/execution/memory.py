"""How many pages the cache has, and what a program may take beside it."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import xla_bridge  # whether a backend exists: JAX has no public way to ask

from jengine.config import EngineConfig, parse_bytes
from jengine.errors import OutOfMemory
from jengine.execution.recurrence import ROWS_BYTES
from jengine.execution.spec import ExecutionSpec
from jengine.table.program_table import SamplerKey, TrunkKey
from pallas_kernels.delta_rule import chunk_size
from pallas_kernels.devices import skip_cuda_check
from pallas_kernels.int4 import Int4
from pallas_kernels.quantized import is_quantized

CPU_DEFAULT = 1 << 30  # bytes
PROGRAM_SHARE = 20  # one in this many bytes is left to programs: temporaries and code
MARGIN_SHARE = 50  # one in this many, where temporaries are known: fragmentation
WORKSPACE = 1 << 22  # bytes that XLA gives a product of cuBLASLt
PAGE_GRID = 64  # pages: a count rounded down to this is likelier to be the same at the next start


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes of a program on one device, as XLA reports them."""

    arguments: int
    outputs: int
    aliased: int  # outputs that are written over donated arguments
    temporaries: int
    code: int = 0  # 0 where XLA does not say

    @property
    def working(self) -> int:
        """What it needs beside its arguments."""
        return self.temporaries + self.outputs - self.aliased


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on one device: what is in them before the cache, and what a page of the cache takes."""

    limit: int  # for all of jengine
    weights: int
    state: int  # slots, and the counts that penalties need
    working: int  # of the program that takes most beside its arguments
    page: int
    staging: int = 0  # pages under way between the device and the host
    states: int = 0  # recurrent ones, of all sequences and snapshots

    @classmethod
    def of(cls, limit: int, spec: ExecutionSpec, programs: Iterable[ProgramMemory]) -> DeviceMemory:
        state = device_bytes((spec.slots, spec.counts))
        working = max(program.working for program in programs)
        return cls(
            limit, device_bytes(spec.params), state, working, spec.page_bytes, spec.staging_bytes, spec.num_states * spec.state_bytes
        )

    @property
    def beside(self) -> int:
        """What is in them beside the cache's pages."""
        return self.weights + self.state + self.working + self.staging + self.states

    @property
    def margin(self) -> int:
        return self.limit // MARGIN_SHARE

    @property
    def pages(self) -> int:
        """How many fit, on the grid; may be negative."""
        free = self.limit - self.beside - self.margin
        return free // self.page // PAGE_GRID * PAGE_GRID


def device_bytes(tree: Any) -> int:
    """Of a device's parts of abstract arrays with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def claim_gpu_memory(share: float) -> None:
    """Let JAX reserve this share of a GPU's memory, if it has not started yet; else say that what it has is used."""
    if not xla_bridge.backends_are_initialized():
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(share))
        skip_cuda_check()
    elif jax.default_backend() == "gpu" and os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") != str(share):
        warnings.warn(f"JAX has started already: gpu_memory_utilization={share} cannot change what it reserved", stacklevel=2)


def pages_that_fit(config: EngineConfig, spec: ExecutionSpec) -> int:
    """Pages of the cache, the null page included. `spec.num_pages` is not looked at.

    A number in the config wins, then a size in bytes. Otherwise a CPU gets what max_num_seqs sequences of
    max_model_len take, at most 1 GiB, and a GPU gets what the weights have left of the memory that JAX reserved, less a margin
    for programs, rounded down to a coarse grid. Recurrent states come out of the size in bytes and of a GPU's memory; a CPU's
    1 GiB is for pages alone.

    Raises:
        OutOfMemory: no room for one page beside the null page.
    """
    if config.num_pages is not None:
        return config.num_pages
    each = spec.page_bytes
    everyone = 1 + spec.max_slots * spec.most_pages(spec.max_model_len)
    given = parse_bytes("kv_cache_memory", config.kv_cache_memory)
    device = spec.mesh.devices.flat[0]
    if given is not None:
        count = (given - spec.num_states * spec.state_bytes) // each
    elif device.platform == "cpu":
        count = min(everyone, CPU_DEFAULT // each // spec.mesh.devices.size)
    else:
        stats = device.memory_stats() or {}
        limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
        free = limit - used - limit // PROGRAM_SHARE - spec.staging_bytes - spec.num_states * spec.state_bytes
        count = min(everyone, free // each // PAGE_GRID * PAGE_GRID)
    return _enough(count, spec, each)


def pages_beside(config: EngineConfig, spec: ExecutionSpec, memory: DeviceMemory) -> int:
    """The same on a GPU, where it is known what its programs take; it need not be there.

    Raises:
        OutOfMemory: no room for one page beside the null page.
    """
    if config.num_pages is not None:
        return config.num_pages
    given = parse_bytes("kv_cache_memory", config.kv_cache_memory)
    count = min(1 + spec.max_slots * spec.most_pages(spec.max_model_len), memory.pages)
    if given is not None:
        count = (given - memory.states) // memory.page
    return _enough(count, spec, memory.page)


def check_room(spec: ExecutionSpec, programs: Iterable[ProgramMemory]) -> None:
    """Whether a GPU that holds the weights already has room for the cache and for what programs take.

    Raises:
        OutOfMemory: it does not.
    """
    stats = spec.mesh.devices.flat[0].memory_stats() or {}
    if "bytes_limit" not in stats:  # a CPU
        return
    memory = DeviceMemory.of(stats["bytes_limit"], spec, programs)
    need, free = spec.num_pages * memory.page + memory.beside - memory.weights, stats["bytes_limit"] - stats["bytes_in_use"]
    if need > free:
        sizes = f"{spec.num_pages} pages and what programs take need {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        raise OutOfMemory(f"no room for the KV cache that the programs were compiled for: {sizes}")


def _enough(count: int, spec: ExecutionSpec, each: int) -> int:
    if count < 2:
        size = f"a page of {spec.page_size} tokens takes {each / 2**20:.1f} MiB, and 2 are needed at least"
        if spec.num_states:
            size += f", beside {spec.num_states} recurrent states of {spec.state_bytes / 2**20:.1f} MiB: lower max_num_seqs for fewer"
        raise OutOfMemory(f"no room for the KV cache: {size}")
    return count


def pages_to_use(fit: int, saved: list[int]) -> int:
    """A count that programs are saved for, if it fits and wastes less than a fifth; else what fits."""
    return max((count for count in saved if 0.8 * fit <= count <= fit), default=fit)


def temporaries_bound(spec: ExecutionSpec, key: TrunkKey | SamplerKey) -> int:
    """Bytes a program's temporaries may take on a device: some activations of its own token axis, in float32; never the cache.

    The factors count the arrays that live at once in a layer (or in a sampler, over the vocabulary), generously; what
    matters is what is missing: the number of pages, and the number of layers.
    """
    model, table = spec.model.config, spec.table
    matrices = [leaf for leaf in jax.tree.leaves(spec.params, is_leaf=is_quantized) if is_quantized(leaf)]
    # one weight at a time; a word has eight four-bit numbers, which are int32 first
    packed = [16 if isinstance(matrix, Int4) else 1 for matrix in matrices]
    converted = 4 * max((each * math.prod(_own(matrix.values)) for each, matrix in zip(packed, matrices, strict=True)), default=0)
    fixed = converted + (0 if spec.mesh.devices.flat[0].platform == "cpu" else WORKSPACE)
    if isinstance(key, SamplerKey):
        own_rows, vocab = -(-key.rows // model.shards), model.padded(model.vocab_size)
        return fixed + 4 * own_rows * 8 * vocab + 4 * key.rows * 16 * model.hidden_size + (1 << 16)
    tokens = table.tokens(key)
    kv_heads = model.num_kv_heads_padded // model.shards
    heads = kv_heads * (model.group_size_padded + 2) * model.head_dim
    ffn = model.padded(model.intermediate_size) // model.shards
    scores = 4 * 8 * kv_heads * model.group_size_padded * table.tile_size * max(spec.page_size, 128)
    linear, states = model.linear, 0
    if linear is not None:  # what a token has in float32 before and after the recurrence, for each head; and states that rows turn at once
        own = model.padded(linear.key_heads) // model.shards * linear.group
        heads += own * (8 * (linear.key_dim + linear.value_dim) + 4 * chunk_size(table.tile_size)) // 6
        each = 4 * own * linear.key_dim * linear.value_dim
        states = 4 * (min(key.rows * each, ROWS_BYTES) + 2 * each)
    width = key.pages * spec.page_size * kv_heads * model.head_dim * 4 * 4 * max(key.rows, 1)
    if model.latent is not None:  # a block of pages of a few rows at a time, on any device
        width = 8 * max(spec.page_size, 128) * model.latent.cached_dim * 4 * 4
    # a token's rows in the experts' order, which may begin a tile of eight each, and the counts that put them there
    expert_rows = 8 * min(model.num_experts, tokens) + tokens * model.experts_per_token if model.num_experts else 0
    experts = 4 * expert_rows * (2 * model.hidden_size + 3 * model.padded(model.expert_size) // model.shards + 3 * model.num_experts)
    return fixed + 4 * tokens * (8 * model.hidden_size + 6 * heads + 4 * ffn) + experts + 4 * scores + width + states + (1 << 20)


def _own(array: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of a device's part."""
    shape: tuple[int, ...] = array.sharding.shard_shape(array.shape)
    return shape
