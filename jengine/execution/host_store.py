"""Pages of the cache in host memory. Of each page, this process stores its own devices' parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jengine.base.errors import InvalidArgument
from jengine.base.host_memory import total_memory
from jengine.execution.kv_cache import Page
from jengine.execution.spec import ExecutionSpec

LARGEST_SHARE = 0.7  # of host memory
PINNED = "pinned_host"  # JAX's name of this kind of memory


class HostStore:
    """Host pages by the scheduler's numbers, and pages staged on the device by their places.

    On a GPU, pages are in pinned memory, so copies run in parallel with programs. On a CPU, they stay in
    ordinary memory. Nothing here waits: an array whose copy has not finished can be passed on.
    """

    def __init__(self, spec: ExecutionSpec) -> None:
        self._like = spec.page
        self._pinned = spec.mesh.local_devices[0].platform == "gpu"
        self._pages: dict[int, Page] = {}
        self._staged: dict[int, Page] = {}
        self._blank: Page = jax.tree.map(_zeros, self._like)

    def keep(self, numbers: Sequence[int], pages: Sequence[Page]) -> list[Page]:
        """Copies pages to the host; number 0 is padding. Returns the copies, which may not be ready yet."""
        new = {
            number: self._to(page, PINNED) if self._pinned else page
            for number, page in zip(numbers, pages, strict=True)
            if number
        }
        self._pages.update(new)
        return [*new.values()]

    def stage(self, numbers: Sequence[int], places: Sequence[int]) -> list[Page]:
        """Copies host pages to places on the device. Returns the copies, which may not be ready yet."""
        staged = [self._pages[number] for number in numbers]
        staged = [self._to(page, None) for page in staged] if self._pinned else staged
        self._staged.update(zip(places, staged, strict=True))
        return staged

    def take(self, places: Sequence[int]) -> list[Page]:
        """Removes and returns the pages staged in these places; zeros for place 0, which is padding."""
        return [self._staged.pop(place) if place else self._blank for place in places]

    def page(self, number: int) -> Page:
        """A host page. It does not change."""
        return self._pages[number]

    def put(self, number: int, leaves: Sequence[np.ndarray]) -> None:
        """Keeps a page that came from a store, by its leaves as they are on all devices together."""
        memory = PINNED if self._pinned else None
        like, tree = jax.tree.flatten(self._like)
        placed = [_placed(leaf, target.sharding, memory) for leaf, target in zip(leaves, like, strict=True)]
        self._pages[number] = jax.tree.unflatten(tree, placed)

    def _to(self, page: Page, memory: str | None) -> Page:
        """Copies a page to this kind of memory; None: the device's."""
        moved: Page = jax.tree.map(lambda array, like: copied(array, like.sharding, memory), page, self._like)
        return moved

    def clear(self) -> None:
        """Forgets all pages."""
        self._pages.clear()


def check_host_memory(swap_space: float, spec: ExecutionSpec) -> None:
    """Checks that this host has enough memory for these pages.

    Raises:
        InvalidArgument: the host has too little memory, or the device cannot copy in parallel with programs.
    """
    devices = spec.mesh.local_devices
    memory = total_memory()
    if spec.host_pages * spec.page_bytes * len(devices) > memory * LARGEST_SHARE:
        limit = (
            f"must be at most {memory * LARGEST_SHARE / len(devices) / 2**30:.3g} GiB for each device,"
            f" {LARGEST_SHARE:.0%} of the host's, or of the container's limit"
        )
        raise InvalidArgument("swap_space", swap_space, limit)
    if devices[0].platform == "gpu" and PINNED not in {
        memory.kind for memory in devices[0].addressable_memories()
    }:
        raise InvalidArgument(
            "swap_space", swap_space, f"must be 0: {devices[0].device_kind} does not address pinned memory"
        )


def copied(array: jax.Array, sharding: NamedSharding, memory: str | None) -> jax.Array:
    """Copies an array to this kind of memory, None: the device's. Shard by shard: this process has no other
    shards, and nothing is compiled.
    """
    parts = []
    for part in array.addressable_shards:
        kind = memory or part.device.default_memory().kind
        parts.append(jax.device_put(part.data, SingleDeviceSharding(part.device, memory_kind=kind)))
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding.with_memory_kind(memory) if memory else sharding, parts
    )


def _placed(array: np.ndarray, sharding: NamedSharding, memory: str | None) -> jax.Array:
    """Copies an array to this kind of memory of each device, None: the device's. Nothing is compiled."""
    parts = []
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        kind = memory or device.default_memory().kind  # type: ignore[attr-defined]
        part = np.ascontiguousarray(array[index])
        parts.append(jax.device_put(part, SingleDeviceSharding(device, memory_kind=kind)))
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding.with_memory_kind(memory) if memory else sharding, parts
    )


def _zeros(array: Any) -> jax.Array:
    """Zeros with an abstract array's shape, dtype and sharding."""
    return jax.make_array_from_callback(
        array.shape,
        array.sharding,
        lambda index: np.zeros(array.sharding.shard_shape(array.shape), array.dtype),
    )
