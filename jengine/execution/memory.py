"""Number of pages in the cache, and the memory that programs need beside it."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import xla_bridge  # to see whether a backend exists: JAX has no public way

from jengine.base.errors import OutOfMemory
from jengine.base.options import parse_bytes
from jengine.core.config import EngineConfig
from jengine.execution.recurrence import ROWS_BYTES
from jengine.execution.spec import ExecutionSpec
from jengine.models.cache import CacheGroup, PageArray, paged
from jengine.parallel.mesh import local
from jengine.table.program_table import TrunkKey
from pallas_kernels.attention.work_list import PARTS, QUERIES, lines_of, most_rows
from pallas_kernels.devices import skip_cuda_check
from pallas_kernels.products.weights import is_weight, stored
from pallas_kernels.recurrence.delta_rule import chunk_size
from pallas_kernels.targets import BLOCKS, CORES

CPU_DEFAULT = 1 << 30  # bytes
PROGRAM_SHARE = 20  # the inverse of the share left to programs, for temporaries and code
MARGIN_SHARE = 50  # the inverse of the share left for fragmentation, if temporaries are known
WORKSPACE = 1 << 22  # bytes that XLA reserves for a cuBLASLt product
PAGE_GRID = 64  # pages; a count rounded down to a multiple is more likely to be the same at the next start


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes of a program on one device, as reported by XLA."""

    arguments: int
    outputs: int
    aliased: int  # outputs that overwrite donated arguments
    temporaries: int
    code: int = 0  # 0 if XLA does not report it

    @property
    def working(self) -> int:
        """Bytes needed beside the arguments."""
        return self.temporaries + self.outputs - self.aliased


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on one device: memory in use without the cache, and the size of a page."""

    limit: int  # limit for all of jengine
    weights: int
    state: int  # slots, and counts for penalties
    working: int  # of the program that needs most beside its arguments
    page: int
    staging: int = 0  # pages in transfer between device and host
    states: int = 0  # recurrent states of all sequences and snapshots
    adapters: int = 0  # places of LoRA adapters

    @classmethod
    def of(cls, limit: int, spec: ExecutionSpec, programs: Iterable[ProgramMemory]) -> DeviceMemory:
        state = device_bytes((spec.slots, spec.counts))
        working = max(program.working for program in programs)
        images = None if spec.images is None else (spec.images.leaves, spec.images.pool)
        return cls(
            limit,
            device_bytes((spec.weights, images)),
            state,
            working,
            spec.page_bytes,
            spec.staging_bytes,
            spec.num_states * spec.state_bytes,
            device_bytes(spec.stacks),
        )

    @property
    def beside(self) -> int:
        """Bytes in use without the cache's pages."""
        return self.weights + self.adapters + self.state + self.working + self.staging + self.states

    @property
    def margin(self) -> int:
        return self.limit // MARGIN_SHARE

    @property
    def pages(self) -> int:
        """Number of pages that fit, on the grid; may be negative."""
        free = self.limit - self.beside - self.margin
        return free // self.page // PAGE_GRID * PAGE_GRID


def device_bytes(tree: Any) -> int:
    """Bytes of one device's part of abstract arrays with shardings."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(local(tree)))


def claim_gpu_memory(share: float) -> None:
    """Makes JAX reserve this share of a GPU's memory. Warns if JAX has started with another share."""
    if not xla_bridge.backends_are_initialized():
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(share))
        skip_cuda_check()
    elif jax.default_backend() == "gpu" and os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") != str(share):
        warnings.warn(
            f"JAX has already started: gpu_memory_utilization={share} cannot change the memory that it"
            " reserved",
            stacklevel=2,
        )


def pages_that_fit(config: EngineConfig, spec: ExecutionSpec, weights: int = 0) -> int:
    """Number of pages in the cache, the null page included. `spec.num_pages` is not used.

    A number of pages in the config has priority, then a size in bytes. Otherwise, a CPU gets as many pages as
    max_num_seqs sequences of max_model_len need, at most 1 GiB. A GPU gets what remains of JAX's reserved
    memory after the weights and a margin for programs, rounded down to a coarse grid. Recurrent states are
    part of the size in bytes and of a GPU's memory, but not of a CPU's 1 GiB.

    Args:
        weights: bytes of weights that are not on a GPU yet.

    Raises:
        OutOfMemory: there is no room for one page beside the null page.
    """
    if config.num_pages is not None:
        return config.num_pages
    each = spec.page_bytes
    everyone = 1 + spec.max_slots * spec.most_pages(spec.max_model_len)
    cache_bytes = parse_bytes("kv_cache_memory", config.kv_cache_memory)
    device = spec.mesh.local_devices[0]
    if cache_bytes is not None:
        count = (cache_bytes - spec.num_states * spec.state_bytes) // each
    elif device.platform == "cpu":
        count = min(everyone, CPU_DEFAULT // each // spec.mesh.devices.size)
    else:
        stats = device.memory_stats() or {}
        limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
        beside = spec.staging_bytes + spec.num_states * spec.state_bytes
        beside += device_bytes(spec.stacks if spec.images is None else (spec.stacks, spec.images.pool))
        free = limit - used - weights - limit // PROGRAM_SHARE - beside
        count = min(everyone, free // each // PAGE_GRID * PAGE_GRID)
    return _enough(count, spec, each)


def pages_beside(config: EngineConfig, spec: ExecutionSpec, memory: DeviceMemory) -> int:
    """Number of pages of a GPU, given the memory that its programs need. The GPU need not be present.

    Raises:
        OutOfMemory: there is no room for one page beside the null page.
    """
    if config.num_pages is not None:
        return config.num_pages
    cache_bytes = parse_bytes("kv_cache_memory", config.kv_cache_memory)
    count = min(1 + spec.max_slots * spec.most_pages(spec.max_model_len), memory.pages)
    if cache_bytes is not None:
        count = (cache_bytes - memory.states) // memory.page
    return _enough(count, spec, memory.page)


def check_room(spec: ExecutionSpec, programs: Iterable[ProgramMemory]) -> None:
    """Checks that a GPU which holds the weights has room for the cache and for programs.

    Raises:
        OutOfMemory: it has not.
    """
    stats = spec.mesh.local_devices[0].memory_stats() or {}
    if "bytes_limit" not in stats:  # a CPU
        return
    memory = DeviceMemory.of(stats["bytes_limit"], spec, programs)
    held = device_bytes((spec.both_leaves, () if spec.images is None else spec.images.leaves))
    need, free = (
        spec.num_pages * memory.page + memory.beside - held,
        stats["bytes_limit"] - stats["bytes_in_use"],
    )
    if need > free:
        sizes = (
            f"{spec.num_pages} pages and the programs need {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are"
            " free"
        )
        raise OutOfMemory(f"no room for the KV cache that the programs were compiled for: {sizes}")


def _enough(count: int, spec: ExecutionSpec, each: int) -> int:
    if count < 2:
        size = f"a page of {spec.page_size} tokens takes {each / 2**20:.1f} MiB, at least 2 are needed"
        if spec.num_states:
            size += (
                f", beside {spec.num_states} recurrent states of {spec.state_bytes / 2**20:.1f} MiB; a lower"
                " max_num_seqs needs fewer"
            )
        raise OutOfMemory(f"no room for the KV cache: {size}")
    return count


def pages_to_use(fit: int, saved: list[int]) -> int:
    """A number of pages with saved programs, if it fits and wastes less than a fifth; otherwise `fit`."""
    return max((count for count in saved if 0.8 * fit <= count <= fit), default=fit)


# --- bounds on the bytes of a program's temporaries on a device ----------------------------------------
# These are some activations, and never the cache. The factors are generous counts of arrays that are live at
# once in a layer (or in a sampler, over the vocabulary). The bounds do not depend on the number of pages or
# layers.


def sampler_temporaries(spec: ExecutionSpec, rows: int) -> int:
    """Bytes of a sampler of `rows` rows."""
    model = spec.model.config
    own_rows, vocab = -(-rows // model.shards), model.padded(model.vocab_size)
    adapters = 0 if spec.adapters is None else _lora_bytes(spec, rows, logits=True)
    return (
        adapters
        + fixed_temporaries(spec)
        + 4 * own_rows * 8 * vocab
        + 4 * rows * 16 * model.hidden_size
        + (1 << 16)
    )


def trunk_temporaries(spec: ExecutionSpec, key: TrunkKey) -> int:
    """Bytes of a trunk: its token axis, in the model's dtype with kernels of a GPU, in float32 elsewhere."""
    if spec.drafting is not None:
        alone = dataclasses.replace(spec, draft=None)
        return trunk_temporaries(alone, key) + trunk_temporaries(spec.drafting, key)
    model, tokens, on_cpu = spec.model, spec.table.tokens(key), spec.mesh.devices.flat[0].platform == "cpu"
    beside, layer = model.working(tokens)
    attending = max(entry.channels for entry in model.entries if entry.kind != "state")
    recurrent = max((entry.channels for entry in model.entries if entry.kind == "state"), default=0)
    mixing = attending + recurrent + _chunk_channels(spec)
    # with kernels for attention, XLA keeps the model's dtype between products; attention and MLP run together
    # only if both read the input
    fused = not on_cpu and not key.pages and all(group.kind in ("full", "window") for group in spec.groups)
    together = max(mixing, layer.channels) if fused and not model.parallel else mixing + layer.channels
    stream = 8 if model.reads is None else 20  # a head also has states before, and joins several
    channels = stream * model.config.hidden_size + together + beside.channels
    each = jnp.dtype(spec.model.dtype).itemsize if fused else 4
    caches = max(_attention_bytes(spec, group, key, on_cpu) for group in paged(spec.groups))
    working = each * tokens * channels + layer.bytes + beside.bytes
    adapters = _lora_bytes(spec, tokens, logits=False) if key.adapted else 0
    return fixed_temporaries(spec) + working + caches + _state_bytes(spec, key) + adapters + (1 << 20)


def _lora_bytes(spec: ExecutionSpec, tokens: int, *, logits: bool) -> int:
    """Bytes of products with adapters: their inner results, and what they add to one weight's product."""
    assert spec.adapters is not None
    largest = 0
    for number, site in spec.adapters.of(logits=logits):
        stack, rows = spec.stacks[number], tokens
        if site.experts is not None:  # in the experts' order, see Experts.working
            rows = 8 * min(site.experts, tokens) + tokens * site.chosen
        outs = sum(math.prod(b.shape[len(site.first) : -1]) for b in local(stack.b))
        largest = max(largest, rows * (4 * math.prod(stack.a.shape[-3:-1]) + 3 * outs))
    return 4 * largest


def _attention_bytes(spec: ExecutionSpec, group: CacheGroup, key: TrunkKey, on_cpu: bool) -> int:
    """Bytes of attention over a group's pages: scores, gathered pages, and results by work item."""
    queries, array = group.queries, group.arrays[0]
    assert queries is not None
    block = max(spec.page_size, 128)
    scores = 4 * 4 * 8 * queries.heads * spec.table.tile_size * block
    kernels = key.rows and not on_cpu
    if queries.rank is not None:  # a block of pages for a few rows at a time, on any device
        gathered = 8 * block * queries.dim * 4 * 4
        # of up to 64 heads, from one thread block per multiprocessor; and queries with padding
        parts = 4 * 2 * CORES * 64 * (queries.rank + 1) + 4 * key.rows * (queries.heads + 64) * queries.dim
        return scores + gathered + parts * bool(kernels)
    kv_heads = array.shape[0] // spec.shards
    gathered = key.pages * spec.page_size * kv_heads * queries.dim * 4 * 4 * max(key.rows, 1)
    heads = queries.heads // kv_heads
    slots = (
        BLOCKS * CORES * most_rows(heads, max(key.rows, 1)) + key.rows * kv_heads
    )  # one for each row of a part
    if spec.table.batch_invariant:
        slots = max(4 * BLOCKS * CORES, PARTS * key.rows * kv_heads)
    parts = 4 * slots * (lines_of(heads) * queries.dim + QUERIES)
    return scores + gathered + parts * bool(kernels)


def _matrices(spec: ExecutionSpec) -> list[PageArray]:
    """A recurrent state's matrices [heads, key_dim, value_dim], if it has any."""
    return [
        array
        for group in spec.groups
        if group.kind == "state"
        for array in group.arrays
        if len(array.shape) == 3
    ]


def _chunk_channels(spec: ExecutionSpec) -> int:
    """Bytes of a recurrence over a chunk of tokens, for each of them."""
    return sum(
        4 * array.shape[0] // spec.shards * chunk_size(spec.table.tile_size) for array in _matrices(spec)
    )


def _state_bytes(spec: ExecutionSpec, key: TrunkKey) -> int:
    """Bytes of the states of rows that are processed at once."""
    each = sum(4 * math.prod(array.shape) // spec.shards for array in _matrices(spec))
    return 4 * (min(key.rows * each, ROWS_BYTES) + 2 * each)


def fixed_temporaries(spec: ExecutionSpec) -> int:
    """Bytes of any program with products: one converted weight at a time, and the workspace of libraries."""
    parameters = jax.tree.leaves(spec.params, is_leaf=is_weight)
    axes = jax.tree.leaves(spec.model.axes, is_leaf=lambda axes: isinstance(axes, tuple))
    pairs = zip(parameters, axes, strict=True)
    converted = max(
        (_converted(spec, parameter, names[0] == "experts") for parameter, names in pairs), default=0
    )
    return converted + (0 if spec.mesh.devices.flat[0].platform == "cpu" else WORKSPACE)


def _converted(spec: ExecutionSpec, parameter: Any, experts: bool) -> int:
    """Bytes of temporaries of a product with one device's part of a parameter."""
    return stored(local(parameter)).converted_bytes(
        spec.model.dtype, grouped=experts, device=spec.mesh.devices.flat[0]
    )
