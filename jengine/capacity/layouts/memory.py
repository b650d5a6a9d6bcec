"""Bytes on each device of an engine with a layout, and how many sequences fit."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import jax

from jengine.capacity.planning.ahead_of_time import device_limit
from jengine.capacity.planning.plan import described, estimated, formats_of
from jengine.capacity.planning.roofline import Formats
from jengine.core.config import EngineConfig
from jengine.devices.device_spec import DeviceSpec
from jengine.execution.memory import DeviceMemory, device_bytes, fixed_temporaries
from jengine.execution.spec import ExecutionSpec
from jengine.parallel.layout import Layout
from pallas_kernels.products.weights import is_weight

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMemory:
    """Bytes on the device that needs most.

    Attributes:
        limit: that jengine may use.
        weights, experts: of matrices for each token, embeddings and head; of experts.
        temporaries: an upper bound: activations of the largest step, and weights that it converts.
        gathered: tokens of all data ranks and their results, where they share experts.
        slots: of sequences, recurrent states included.
        margin: for fragmentation.
        page: of a page.
        data: ranks, each with such a cache.
    """

    limit: int
    weights: int
    experts: int
    temporaries: int
    gathered: int
    slots: int
    margin: int
    page: int
    data: int

    @property
    def free(self) -> int:
        """For the cache; negative: it does not fit."""
        used = self.weights + self.experts + self.temporaries + self.gathered + self.slots + self.margin
        return self.limit - used

    @property
    def pages(self) -> int:
        """Of each rank."""
        return max(0, self.free // self.page)

    def sequences(self, pages: int) -> int:
        """That all ranks hold, with so many pages each."""
        return self.data * (self.pages // pages)

    def __str__(self) -> str:
        """Parts in GiB, the largest first, without those that are nearly nothing."""
        parts = {
            "weights": self.weights,
            "experts": self.experts,
            "temporaries": self.temporaries,
            "gathered tokens": self.gathered,
            "slots": self.slots,
            "margin": self.margin,
        }
        largest = sorted(parts.items(), key=lambda part: -part[1])
        named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest if size >= GIB // 20)
        return f"{named} of {self.limit / GIB:.1f} GiB"


@dataclass(frozen=True)
class TensorGroup:
    """An engine of so many devices with tensor parallelism alone, from which layouts are put together.

    Attributes:
        memory: on each device.
        experts, others: bytes on each device, of experts, and of matrices that are neither experts nor
            embeddings or heads.
        vocabulary: of each embedding and head.
        converted: bytes of temporaries that do not depend on the step.
        known: see `routed`.
    """

    spec: ExecutionSpec
    formats: Formats
    memory: DeviceMemory
    experts: int
    vocabulary: tuple[int, ...]
    others: int
    converted: int
    known: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, config: EngineConfig, tensor: int, device: DeviceSpec) -> TensorGroup:
        """Describes it.

        Raises:
            InvalidArgument: the model or device does not support an option.
            ModelError: the model cannot be read, or is not supported.
        """
        spec = described(dataclasses.replace(config, tensor_parallel_size=tensor), device)
        memory = DeviceMemory.of(device_limit(config, device), spec, estimated(spec).values())
        kinds = defaultdict[str, list[int]](list)
        parameters = jax.tree.leaves(spec.params, is_leaf=is_weight)
        axes: list[Any] = jax.tree.leaves(spec.model.axes, is_leaf=lambda names: isinstance(names, tuple))
        for parameter, names in zip(parameters, axes, strict=True):
            kinds[names[0] if names else ""].append(device_bytes(parameter))
        experts, vocabulary = sum(kinds["experts"]), tuple(kinds["vocab"])
        others = memory.weights - experts - sum(vocabulary)
        converted = fixed_temporaries(spec)
        return cls(spec, formats_of(spec), memory, experts, vocabulary, others, converted)

    def routed(self, tokens: int) -> int:
        """Bytes of an MLP's arrays for so many tokens."""
        if tokens not in self.known:
            self.known[tokens] = self.spec.model.working(tokens)[1].bytes
        return self.known[tokens]


def memory_of(
    group: TensorGroup, layout: Layout, layers: tuple[int, ...], stage: TensorGroup, rows: int
) -> LayoutMemory:
    """The memory of a layout.

    Args:
        group: of `layout.tensor` devices.
        layers: of each stage.
        stage: of all devices of a stage, among which whole experts are divided; otherwise `group`.
        rows: the most decoding sequences of a data rank in a step.
    """
    memory, share = group.memory, max(layers) / sum(layers)
    experts = float(group.experts)
    if layout.expert_parallel:
        count, shards = group.spec.model.elements.experts, layout.expert_shards
        experts = stage.experts * (-(-count // shards) * shards / count)  # with padding
    ends = sum(group.vocabulary) if layout.stages == 1 else max(group.vocabulary, default=0)
    return LayoutMemory(
        limit=memory.limit,
        weights=math.ceil(share * group.others) + ends,
        experts=math.ceil(share * experts),
        temporaries=memory.working - max(0, group.converted - stage.converted),
        gathered=_gathered(group, layout, rows),
        slots=memory.state + math.ceil(share * memory.states) + memory.staging,
        margin=memory.margin,
        page=math.ceil(share * memory.page),
        data=layout.data,
    )


def _gathered(group: TensorGroup, layout: Layout, rows: int) -> int:
    """Of an MLP with experts, for the rows of all ranks and the prompts that they have together."""
    if layout.data == 1:
        return 0
    model, table = group.spec.model, group.spec.table
    own = table.max_rows + table.max_tiles * table.tile_size
    every = layout.data * rows + table.max_tiles * table.tile_size
    itemsize = model.dtype.itemsize
    return max(0, group.routed(every) - group.routed(own)) + 2 * every * model.config.hidden_size * itemsize
