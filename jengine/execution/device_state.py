"""What an engine keeps on its devices between calls, and pages in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jengine.base.errors import InvalidArgument
from jengine.base.host_memory import total_memory
from jengine.execution.kv_cache import Page
from jengine.execution.logits import ALL_ALLOWED, mask_words
from jengine.execution.loras import Stacks
from jengine.execution.spec import ExecutionSpec
from jengine.execution.trunk import ToSample
from jengine.models import Params

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
        placed = [copied(leaf, target.sharding, memory) for leaf, target in zip(leaves, like, strict=True)]
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


def copied(array: jax.Array | np.ndarray, sharding: NamedSharding, memory: str | None) -> jax.Array:
    """A copy in this kind of memory, None: the device's. By shard, so nothing is compiled."""
    if isinstance(array, np.ndarray):
        indices = sharding.addressable_devices_indices_map(array.shape)
        shards: dict[Any, Any] = {device: np.ascontiguousarray(array[at]) for device, at in indices.items()}
    else:
        shards = {part.device: part.data for part in array.addressable_shards}
    parts = []
    for device, part in shards.items():
        kind = memory or device.default_memory().kind
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


ALLOCATE, ALLOCATE_COUNTS, ALLOCATE_LORAS = "allocate", "allocate-counts", "allocate-adapters"
ALLOCATE_POOL = "allocate-pool"


class ByKey(Protocol):
    """Programs by their keys."""

    def __getitem__(self, key: Any, /) -> Any: ...


class DeviceState:
    """Weights, cache and slots, counts once a request has needed them, and results that the next call reads.

    Attributes:
        leaves: those of the parameters, as programs take them.
        draft_leaves, both_leaves: those of the draft model's parameters, if there is one, and of both.
        draft_only_leaves: those of `draft_leaves` that are none of the model's; a head shares some.
        stacks: the stacked adapters; none without programs for them.
        pool: embeddings of images; None without programs for them.
        encoder_leaves: those of the parameters of the images' encoder.
        counts: see ExecutionSpec.counts; None: not allocated.
        to_sample, tiles: results of the last trunk, for the programs that follow it.
        entering, leaving: hidden states from the stage before, and for the one behind, in a pipeline.
        store: pages in host memory; None: there is no host tier.
    """

    def __init__(
        self,
        spec: ExecutionSpec,
        programs: ByKey,
        params: Params,
        draft: Params = None,
        encoder: Params = None,
    ) -> None:
        self.spec, self.programs = spec, programs
        self._shared = _shared_leaves(spec)
        self.put_leaves(jax.tree.leaves(params), self.only_of_draft(jax.tree.leaves(draft)))
        self.cache: Any = None
        self.slots: Any = None
        self.allocate()
        self.stacks: Stacks = programs[ALLOCATE_LORAS]() if spec.stacks else ()
        self.pool: jax.Array | None = programs[ALLOCATE_POOL]() if spec.images else None
        self.encoder_leaves: tuple[jax.Array, ...] = tuple(jax.tree.leaves(encoder))
        self.counts: jax.Array | None = None
        self.to_sample: ToSample | None = None
        self.tiles: jax.Array | None = None
        self.entering: jax.Array | None = None
        self.leaving: jax.Array | None = None
        self.store = HostStore(spec) if spec.host_pages else None
        self._local = spec.replicated.is_fully_addressable
        self._all_allowed: dict[int, jax.Array] = {}  # by rows

    def allocate(self) -> None:
        """Allocates the cache and the slots."""
        self.cache, self.slots = self.programs[ALLOCATE]()

    def put_leaves(self, leaves: Sequence[jax.Array], draft: Sequence[jax.Array] | None = None) -> None:
        """Sets the model's parameters, perhaps none for a while, and those of the draft model alone."""
        self.leaves = tuple(leaves)
        if draft is not None:
            self.draft_only_leaves = tuple(draft)
        draft_only = iter(self.draft_only_leaves)
        every = [next(draft_only) if at is None else self.leaves[at] for at in self._shared] if leaves else ()
        self.draft_leaves = tuple(every)
        self.both_leaves = (*self.leaves, *self.draft_leaves)

    def only_of_draft[T](self, leaves: Sequence[T]) -> list[T]:
        """The draft model's leaves that are none of the model's."""
        return [leaf for leaf, at in zip(leaves, self._shared, strict=True) if at is None]

    @property
    def head_stacks(self) -> Stacks:
        """The stacked adapters for programs that compute logits; none if adapters cannot change the head."""
        return self.stacks if self.spec.head_stacks else ()

    def take_leaves(self) -> list[jax.Array]:
        """Gives up the model's parameters: the caller's list is the only reference to them here."""
        leaves = [*self.leaves]
        self.leaves = self.draft_leaves = self.both_leaves = ()
        return leaves

    def take_encoder(self) -> list[jax.Array]:
        """Gives up the encoder's parameters, as `take_leaves` does."""
        leaves, self.encoder_leaves = [*self.encoder_leaves], ()
        return leaves

    def forget_counts(self) -> None:
        """Frees the counts, which are allocated again when needed."""
        self.counts = None

    def free_cache(self) -> None:
        """Frees all that steps write. No step may be in flight, no sequence may own a page or a slot."""
        self.cache = self.slots = self.counts = self.to_sample = self.tiles = None
        self.entering = self.leaving = None
        if self.store is not None:
            self.store.clear()

    def put(self, array: np.ndarray, sharding: NamedSharding | None = None) -> np.ndarray | jax.Array:
        """An array for the devices, as an argument of a program. sharding: None: it is whole on each.

        If all devices are in this process, programs place the array themselves, which is much faster than
        device_put.
        """
        return array if self._local else self._placed(array, sharding)

    def all_allowed(self, rows: int) -> jax.Array:
        """A token mask that allows everything, on the devices."""
        if rows not in self._all_allowed:
            words = mask_words(self.spec.model.config.vocab_size)
            self._all_allowed[rows] = self._placed(np.full((rows, words), ALL_ALLOWED))
        return self._all_allowed[rows]

    def _placed(self, array: np.ndarray, sharding: NamedSharding | None = None) -> jax.Array:
        where = sharding or self.spec.replicated
        placed: jax.Array = jax.make_array_from_callback(array.shape, where, array.__getitem__)
        return placed

    def get_counts(self) -> jax.Array:
        """The counts, allocated if necessary."""
        counts: jax.Array = self.programs[ALLOCATE_COUNTS]() if self.counts is None else self.counts
        return counts


def _shared_leaves(spec: ExecutionSpec) -> list[int | None]:
    """For each leaf of the draft model, the number of the model's leaf that it is; None: it is none."""
    if spec.draft is None:
        return []
    of_model = [path for path, _ in jax.tree.leaves_with_path(spec.params)]
    of_draft = [path for path, _ in jax.tree.leaves_with_path(spec.draft.params)]
    shared = {path: at for at, path in enumerate(of_model) if path[0].key in spec.draft.shared}
    return [shared.get(path) for path in of_draft]


def start_host_copy(arrays: Any) -> Any:
    """Starts the copy of results to the host. Returns them."""
    for array in jax.tree.leaves(arrays):
        array.copy_to_host_async()
    return arrays
