"""Bytes on each device of an engine that need not run: of one with tensor parallelism, of other layouts, and
of this machine's; and settings with which a model fits, for plans that do not.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jengine.base.errors import JengineError, OutOfMemory
from jengine.base.host_memory import total_memory
from jengine.capacity.planning.ahead_of_time import describe_for, describe_on, device_limit, largest
from jengine.capacity.planning.roofline import Formats, kv_token_bytes
from jengine.checkpoints.weights import num_bytes
from jengine.core.config import EngineConfig
from jengine.core.quantization import FOUR_BITS
from jengine.devices.device_spec import DeviceSpec
from jengine.execution.kinds import Key, kind_of
from jengine.execution.kv_cache import SHARED
from jengine.execution.memory import (
    DeviceMemory,
    ProgramMemory,
    device_bytes,
    fixed_temporaries,
    pages_beside,
    pages_that_fit,
)
from jengine.execution.spec import ExecutionSpec
from jengine.models.cache import places
from jengine.parallel.collectives import DATA, TENSOR
from jengine.parallel.layout import Layout
from pallas_kernels.products.weights import is_weight

GIB = 1 << 30
WORKSPACE = 32 << 20  # maximum bytes that XLA gives cuBLAS beside a program's temporaries


@dataclass(frozen=True, slots=True)
class TargetDevice:
    """Represents an absent GPU in a mesh. Suffices to describe programs for it, but not to compile them."""

    id: int
    device_kind: str
    compute_capability: str
    platform: str = "gpu"
    process_index: int = 0


def described(config: EngineConfig, device: DeviceSpec) -> ExecutionSpec:
    """Everything except the number of pages, for devices of this kind.

    Raises:
        InvalidArgument: the model or device does not support an option.
        ModelError: the model cannot be read, or is not supported.
    """
    layout = config.layout
    axes = {DATA: layout.data, TENSOR: layout.tensor} if layout.data > 1 else {TENSOR: layout.tensor}
    count, shape = layout.stage_devices, tuple(axes.values())
    devices = np.array([TargetDevice(i, device.name, device.capability) for i in range(count)], object)
    types = (AxisType.Auto,) * len(shape)
    return describe_on(config, Mesh(devices.reshape(shape), tuple(axes), axis_types=types))


def estimated(spec: ExecutionSpec) -> dict[Key, ProgramMemory]:
    """Upper bounds on the memory of the programs that need most."""
    return {
        key: ProgramMemory(0, 0, 0, kind_of(key).temporaries(spec, key) + WORKSPACE) for key in largest(spec)
    }


def room(
    config: EngineConfig, spec: ExecutionSpec, limit: int, programs: dict[Key, ProgramMemory] | None = None
) -> tuple[DeviceMemory, int]:
    """The use of a device's memory, and the number of pages that the engine wants; 0: none fits.

    Args:
        limit: bytes that jengine may use.
        programs: memory of the programs that need most; None: upper bounds.
    """
    memory = DeviceMemory.of(limit, spec, (programs or estimated(spec)).values())
    try:
        on_host = spec.mesh.devices.flat[0].platform == "cpu"
        pages = pages_that_fit(config, spec) if on_host else pages_beside(config, spec, memory)
    except OutOfMemory:
        pages = 0
    return memory, pages


def fits(memory: DeviceMemory, pages: int) -> bool:
    """Whether a device has room for so many pages; a number that options ask for may be too large."""
    return pages > 0 and pages * memory.page + memory.beside <= memory.limit


def local_room(config: EngineConfig) -> tuple[ExecutionSpec, DeviceMemory, int]:
    """`room` on this machine's device, and what it is of. Reads no weights and compiles nothing.

    Raises:
        ModelError: the model cannot be read, or is not supported.
        InvalidArgument: the model or device does not support an option.
    """
    spec = describe_for(config, None)
    device = spec.mesh.local_devices[0]
    on_host = device.platform == "cpu"
    limit = total_memory() if on_host else (device.memory_stats() or {}).get("bytes_limit", 0)
    return spec, *room(config, spec, limit)


def formats_of(spec: ExecutionSpec) -> Formats:
    """Number formats of the spec's parameters and cache."""
    model = spec.model
    dtype = jnp.dtype(model.dtype)
    matrices = [leaf for leaf in jax.tree.leaves(spec.params, is_leaf=is_weight) if len(leaf.shape) > 1]
    width: float = model.format.bits // 8
    # formats vary between weights, and scales count
    if model.quantization in FOUR_BITS or model.config.stored is not None:
        width = num_bytes(matrices) / sum(math.prod(matrix.shape) for matrix in matrices)
    row = places(spec.groups, SHARED)[0][0].shape[-1]
    scale = 4 / row if spec.kv_cache_dtype else 0.0  # float32, for each token and head
    return Formats(
        weight_bytes=width,
        product=model.format.inputs or str(dtype),
        dtype=str(dtype),
        activation_bytes=dtype.itemsize,
        kv_bytes=kv_token_bytes(model, spec.cache_dtype.itemsize + scale),
        state_bytes=spec.state_bytes,
    )


def listed(memory: DeviceMemory) -> str:
    """The parts without the cache in GiB, the largest first, without those that are nearly nothing."""
    parts = {
        "weights": memory.weights,
        "temporaries": memory.working,
        "recurrent states": memory.states,
        "slots": memory.state,
        "adapters": memory.adapters,
        "staging": memory.staging,
        "margin": memory.margin,
    }
    descending = sorted(parts.items(), key=lambda part: -part[1])
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in descending if size >= GIB // 20)
    return f"{named} of {memory.limit / GIB:.1f} GiB"


@dataclass(frozen=True)
class TensorGroup:
    """An engine of some devices with tensor parallelism alone, from which layouts are put together.

    Attributes:
        memory: on each device.
        experts, others: bytes on each device, of experts, and of matrices that are neither experts nor
            embeddings or heads.
        vocabulary: of each embedding and head.
        converted: bytes of temporaries that do not depend on the step.
        routed_bytes: results of `routed`.
    """

    spec: ExecutionSpec
    formats: Formats
    memory: DeviceMemory
    experts: int
    vocabulary: tuple[int, ...]
    others: int
    converted: int
    routed_bytes: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, config: EngineConfig, tensor: int, device: DeviceSpec) -> TensorGroup:
        """A group of `tensor` devices. Raises the errors of `described`."""
        config = dataclasses.replace(config, tensor_parallel_size=tensor)
        spec = described(config, device)
        memory, _ = room(config, spec, device_limit(config, device))
        kinds = defaultdict[str, list[int]](list)
        parameters = jax.tree.leaves(spec.params, is_leaf=is_weight)
        axes: list[Any] = jax.tree.leaves(spec.model.axes, is_leaf=lambda names: isinstance(names, tuple))
        for parameter, names in zip(parameters, axes, strict=True):
            kinds[names[0] if names else ""].append(device_bytes(parameter))
        experts, vocabulary = sum(kinds["experts"]), tuple(kinds["vocab"])
        others = memory.weights - experts - sum(vocabulary)
        return cls(spec, formats_of(spec), memory, experts, vocabulary, others, fixed_temporaries(spec))

    def routed(self, tokens: int) -> int:
        """Bytes of an MLP's arrays for so many tokens."""
        if tokens not in self.routed_bytes:
            self.routed_bytes[tokens] = self.spec.model.working(tokens)[1].bytes
        return self.routed_bytes[tokens]


def layout_memory(
    group: TensorGroup, layout: Layout, layers: tuple[int, ...], whole: TensorGroup, rows: int
) -> DeviceMemory:
    """The memory of a layout, on the device that needs most.

    Args:
        group: of `layout.tensor` devices.
        layers: of each stage.
        whole: of one device. Whole experts have these bytes; parts of experts may be stored in another way.
        rows: the most decoding sequences of a data rank in a step.
    """
    memory, share = group.memory, max(layers) / sum(layers)
    experts, converted, shards = float(group.experts), group.converted, layout.expert_shards
    if shards > 1:
        count = group.spec.model.elements.experts
        experts = whole.experts * -(-count // shards) / count  # with padding
        converted //= layout.data
    ends = sum(group.vocabulary) if layout.stages == 1 else max(group.vocabulary, default=0)
    return dataclasses.replace(
        memory,
        weights=math.ceil(share * group.others) + ends + math.ceil(share * experts),
        adapters=math.ceil(share * memory.adapters),
        working=memory.working - group.converted + converted + _gathered(group, layout, rows),
        states=math.ceil(share * memory.states),
        page=math.ceil(share * memory.page),
    )


def _gathered(group: TensorGroup, layout: Layout, rows: int) -> int:
    """Bytes of an MLP with experts, for the rows of all data ranks and the prompts that they have
    together."""
    if layout.data == 1:
        return 0
    model, table = group.spec.model, group.spec.table
    alone = table.max_rows + table.max_tiles * table.tile_size
    together = layout.data * rows + table.max_tiles * table.tile_size
    difference = max(0, group.routed(together) - group.routed(alone))
    return difference + 2 * together * model.config.hidden_size * model.dtype.itemsize


LEAST_TOKENS = 2048  # of the cache, or max_model_len: less is not worth a start
BUDGETS = 4096, 2048, 1024, 512  # values of max_num_batched_tokens
QUANTIZATIONS = "int8", "int4"
FEW_SEQUENCES, SHORTER, MORE_MEMORY = 32, 8192, 0.95
DEVICES = 2, 4, 8


@dataclass(frozen=True, slots=True)
class Fitting:
    """Options that make a model fit, and the cache that they leave: its bytes on each device, its tokens."""

    options: dict[str, Any]
    cache: int
    tokens: int

    def __str__(self) -> str:
        """Such as --max-num-batched-tokens 1024 (2.5 GiB of cache, 20,416 tokens)."""
        flags = {f"--{name.replace('_', '-')}": value for name, value in self.options.items()}
        changes = " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None)
        without = "".join(f"no {flag}" for flag, value in flags.items() if value is None)
        where = " on each device" if "tensor_parallel_size" in self.options else ""
        return f"{changes or without} ({self.cache / 2**30:.1f} GiB of cache{where}, {self.tokens:,} tokens)"


def what_fits(
    config: EngineConfig,
    room: Callable[[EngineConfig], tuple[int, int]],
    *,
    most_tokens: int,
    weights_fit: bool,
) -> list[Fitting]:
    """The cheapest settings of each kind that make the model fit: fewer tokens a step, then also fewer
    sequences and more memory; shorter sequences; quantized weights; more devices. Empty if none does.

    Args:
        room: the bytes of the cache that a configuration leaves on each device, and its tokens; 0 if it does
            not fit. Raises JengineError where the model or the device does not support it.
        most_tokens: max_model_len.
        weights_fit: whether the weights alone fit; if not, no smaller step helps.
    """
    enough = min(LEAST_TOKENS, most_tokens)

    def first(kind: Iterator[dict[str, Any]]) -> Iterator[Fitting]:
        for options in kind:
            try:
                cache, tokens = room(dataclasses.replace(config, **options))
            except JengineError:
                continue
            if tokens >= enough:
                yield Fitting(options, cache, tokens)
                return

    unset = {name: None for name in ("num_pages", "kv_cache_memory") if getattr(config, name) is not None}
    if unset and (fits := [*first(iter([unset]))]):  # otherwise it is not only this
        return fits
    # without jengine's kernels, temporaries grow with the longest sequence
    shorter: list[dict[str, Any]] = [{"max_model_len": SHORTER}] if most_tokens > SHORTER else []
    smaller = [*first(_smaller(config)), *first(iter(shorter))] if weights_fit else []
    return [*smaller, *first(_quantized(config)), *first(_shared(config))]


def _smaller(config: EngineConfig) -> Iterator[dict[str, Any]]:
    """Options that change no result. The largest budgets first."""
    budgets = [budget for budget in BUDGETS if budget < (config.max_num_batched_tokens or 2 * BUDGETS[0])]
    rows = config.max_num_seqs or 256
    for budget in budgets:
        if budget >= rows + config.tile_size:
            yield {"max_num_batched_tokens": budget}
    few: dict[str, Any] = {"max_num_batched_tokens": BUDGETS[-1]} | (
        {"max_num_seqs": FEW_SEQUENCES} if rows > FEW_SEQUENCES else {}
    )
    yield few
    if config.gpu_memory_utilization < MORE_MEMORY:
        yield few | {"gpu_memory_utilization": MORE_MEMORY}


def _quantized(config: EngineConfig) -> Iterator[dict[str, Any]]:
    """Fewer bytes of weights, the most exact first; then with a smaller step, too."""
    if config.quantization is not None:
        return
    for smaller in ({}, {"max_num_batched_tokens": 1024}):
        for quantization in QUANTIZATIONS:
            yield {"quantization": quantization, **smaller}


def _shared(config: EngineConfig) -> Iterator[dict[str, Any]]:
    for count in DEVICES:
        if count > config.tensor_parallel_size:
            yield {"tensor_parallel_size": count}
