"""The cache and the slots when an engine starts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jengine.execution.device_state import ALLOCATE, DeviceState
from jengine.execution.kinds.kind import Kind, Program, partitions
from jengine.execution.spec import ExecutionSpec


class Allocate(Kind[str]):
    """Allocates the cache and the slots, all zeros."""

    name, while_serving, joint = ALLOCATE, False, True

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        both = spec.cache, spec.slots

        def allocate() -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), both)

        return Program("allocate", allocate, (), partitions(both), by_shard=False)

    def run(self, state: DeviceState, key: str, array: None) -> None:
        state.allocate()
