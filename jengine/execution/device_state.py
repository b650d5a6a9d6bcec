"""What an engine keeps on its devices between calls."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import numpy as np

from jengine.execution.adapters import Stacks
from jengine.execution.host_store import HostStore
from jengine.execution.logits import ALL_ALLOWED, mask_words
from jengine.execution.spec import ExecutionSpec
from jengine.execution.trunk import ToSample
from jengine.models import Params

ALLOCATE, ALLOCATE_COUNTS, ALLOCATE_ADAPTERS = "allocate", "allocate-counts", "allocate-adapters"


class ByKey(Protocol):
    """Programs by their keys."""

    def __getitem__(self, key: Any, /) -> Any: ...


class DeviceState:
    """Weights, cache and slots, counts once a request has needed them, and results that the next call reads.

    Attributes:
        leaves: those of `params`, as programs take them.
        draft: parameters of the draft model; None: there is none.
        draft_leaves, both_leaves: those of `draft`, and of both.
        stacks: the stacked adapters; none without programs for them.
        counts: see ExecutionSpec.counts; None: not allocated.
        to_sample, tiles: results of the last trunk, for the programs that follow it.
        store: pages in host memory; None: there is no host tier.
    """

    def __init__(self, spec: ExecutionSpec, programs: ByKey, params: Params, draft: Params = None) -> None:
        self.spec, self.programs, self.params = spec, programs, params
        self.leaves, self.draft = tuple(jax.tree.leaves(params)), draft
        self.draft_leaves = tuple(jax.tree.leaves(draft))
        self.both_leaves = (*self.leaves, *self.draft_leaves)
        self.cache, self.slots = programs[ALLOCATE]()
        self.stacks: Stacks = programs[ALLOCATE_ADAPTERS]() if spec.stacks else ()
        self.counts: jax.Array | None = None
        self.to_sample: ToSample | None = None
        self.tiles: jax.Array | None = None
        self.store = HostStore(spec) if spec.host_pages else None
        self._local = spec.replicated.is_fully_addressable
        self._all_allowed: dict[int, jax.Array] = {}  # by rows

    def put(self, array: np.ndarray) -> np.ndarray | jax.Array:
        """An array for all devices, as an argument of a program.

        If all devices are in this process, programs place the array themselves, which is much faster than
        device_put.
        """
        return array if self._local else self._everywhere(array)

    def put_sharded(self, array: np.ndarray, like: jax.ShapeDtypeStruct) -> np.ndarray | jax.Array:
        """The same for an array that is divided among the devices as `like` is."""
        if self._local:
            return array
        placed: jax.Array = jax.make_array_from_callback(array.shape, like.sharding, array.__getitem__)
        return placed

    def all_allowed(self, rows: int) -> jax.Array:
        """A token mask that allows everything, on the devices."""
        if rows not in self._all_allowed:
            words = mask_words(self.spec.model.config.vocab_size)
            self._all_allowed[rows] = self._everywhere(np.full((rows, words), ALL_ALLOWED))
        return self._all_allowed[rows]

    def _everywhere(self, array: np.ndarray) -> jax.Array:
        placed: jax.Array = jax.make_array_from_callback(array.shape, self.spec.replicated, array.__getitem__)
        return placed

    def get_counts(self) -> jax.Array:
        """The counts, allocated if necessary."""
        counts: jax.Array = self.programs[ALLOCATE_COUNTS]() if self.counts is None else self.counts
        return counts


def start_host_copy(arrays: Any) -> Any:
    """Starts the copy of results to the host. Returns them."""
    for array in jax.tree.leaves(arrays):
        array.copy_to_host_async()
    return arrays
