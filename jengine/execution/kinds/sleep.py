"""Memory that is given back while an engine sleeps. The cache comes back with the kind `allocate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jengine.execution.device_state import DeviceState
from jengine.execution.host_store import PINNED, copied
from jengine.execution.kinds.kind import CallKind


class FreeCache(CallKind[str]):
    """Frees the cache, the slots, the counts and the host tier's pages."""

    name = "free-cache"

    def run(self, state: DeviceState, key: str, array: None) -> None:
        state.free_cache()


class MoveWeights(CallKind[str]):
    """Moves the weights, int32 [2]: whether to the host's memory, which on a CPU holds them already; and
    whether the model's are kept. Those of a draft model are, in any case.
    """

    name = "move-weights"

    def run(self, state: DeviceState, key: str, array: np.ndarray) -> None:
        away, keep = array.tolist()
        spec, leaves, draft = state.spec, state.leaves if keep else (), state.draft_only_leaves
        if spec.mesh.local_devices[0].platform == "gpu":
            leaves = _moved(leaves, spec.leaves, away)
            like = () if spec.drafting is None else spec.drafting.leaves
            draft = _moved(draft, state.only_of_draft(like), away)
        state.put_leaves(leaves, draft)


def _moved(leaves: Sequence[jax.Array], like: Sequence[Any], away: bool) -> tuple[jax.Array, ...]:
    """Copies of these leaves, if there are any, on the host or on the devices."""
    memory = PINNED if away else None
    moved = (copied(leaf, target.sharding, memory) for leaf, target in zip(leaves, like, strict=False))
    done: tuple[jax.Array, ...] = jax.block_until_ready(tuple(moved))
    return done
