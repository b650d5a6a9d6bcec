"""Pages of the cache in the host's memory: of each, the parts that this process's devices hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jengine.errors import InvalidArgument
from jengine.execution.kv_cache import Page
from jengine.execution.spec import ExecutionSpec

LARGEST_SHARE = 0.7  # of the host's memory
PINNED = "pinned_host"  # JAX's name of a memory


class HostStore:
    """Pages by the numbers that the scheduler gives them, and those staged on the device by their places.

    A GPU's pages lie in pinned memory, which it copies from and to beside its programs. A CPU's lie where they can be used as they are.
    Nothing here waits: an array that is still on its way can be passed on.
    """

    def __init__(self, spec: ExecutionSpec) -> None:
        self._like = spec.page
        self._pinned = spec.mesh.local_devices[0].platform == "gpu"
        self._pages: dict[int, Page] = {}
        self._staged: dict[int, Page] = {}
        self._blank: Page = jax.tree.map(_zeros, self._like)

    def keep(self, numbers: Sequence[int], pages: Sequence[Page]) -> list[Page]:
        """Moves pages to the host; number 0 is padding. Returns them: they have arrived when they are ready."""
        kept = {number: self._to(page, PINNED) if self._pinned else page for number, page in zip(numbers, pages, strict=True) if number}
        self._pages.update(kept)
        return [*kept.values()]

    def stage(self, numbers: Sequence[int], places: Sequence[int]) -> list[Page]:
        """Moves pages to places on the device. Returns them: they have arrived when they are ready."""
        staged = [self._pages[number] for number in numbers]
        staged = [self._to(page, None) for page in staged] if self._pinned else staged
        self._staged.update(zip(places, staged, strict=True))
        return staged

    def take(self, places: Sequence[int]) -> list[Page]:
        """What is staged in these places, once; zeros for place 0, which is padding."""
        return [self._staged.pop(place) if place else self._blank for place in places]

    def _to(self, page: Page, memory: str | None) -> Page:
        """A copy of a page in a memory; None: the device's."""
        copied: Page = jax.tree.map(lambda array, like: _copied(array, like.sharding, memory), page, self._like)
        return copied


def check_host_memory(swap_space: float, spec: ExecutionSpec) -> None:
    """Whether this host can have as many pages.

    Raises:
        InvalidArgument: it has less memory; or the device cannot copy beside its programs.
    """
    devices = spec.mesh.local_devices
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if spec.host_pages * spec.page_bytes * len(devices) > memory * LARGEST_SHARE:
        limit = (
            f"must be at most {memory * LARGEST_SHARE / len(devices) / 2**30:.3g} GiB for each device, {LARGEST_SHARE:.0%} of the host's"
        )
        raise InvalidArgument("swap_space", swap_space, limit)
    if devices[0].platform == "gpu" and PINNED not in {memory.kind for memory in devices[0].addressable_memories()}:
        raise InvalidArgument("swap_space", swap_space, f"must be 0: {devices[0].device_kind} does not address pinned memory")


def _copied(array: jax.Array, sharding: NamedSharding, memory: str | None) -> jax.Array:
    """Shard by shard: this process has no others, and nothing is compiled."""
    parts = []
    for part in array.addressable_shards:
        kind = memory or part.device.default_memory().kind
        parts.append(jax.device_put(part.data, SingleDeviceSharding(part.device, memory_kind=kind)))
    return jax.make_array_from_single_device_arrays(array.shape, sharding.with_memory_kind(memory) if memory else sharding, parts)


def _zeros(array: Any) -> jax.Array:
    """Of an abstract array's shape, dtype and sharding."""
    return jax.make_array_from_callback(
        array.shape, array.sharding, lambda index: np.zeros(array.sharding.shard_shape(array.shape), array.dtype)
    )
