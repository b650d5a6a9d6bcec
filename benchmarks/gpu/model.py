"""Models without a checkpoint: shapes from a configuration, weights drawn on the device; and the programs that a benchmark needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jengine.execution.programs import ALLOCATE, Key, compile_all
from jengine.execution.spec import ExecutionSpec
from tools.make_model import STANDARD_DEVIATION


class Chosen(dict[Key, Any]):
    """Stands for Programs: those that are needed, by key, and what warm-up measures of them."""

    def __init__(self, programs: dict[Key, Any]) -> None:
        super().__init__(programs)
        self.costs: dict[str, float] = {}


def compiled(spec: ExecutionSpec, threads: int) -> Chosen:
    """All trunks, with their greedy samplers."""
    table = spec.table
    samplers = dict.fromkeys(table.sampler(key, "greedy") for key in table.trunks())
    keys: Iterable[Key] = [ALLOCATE, *table.trunks(), *samplers]
    return Chosen({built.key: built.program for built in compile_all(spec, list(keys), threads=threads, progress=False)})


def random_params(spec: ExecutionSpec) -> Any:
    """Norms are ones; the rest is normal, as tools/make_model.py has it. One parameter at a time."""
    key = jax.random.key(0)

    def draw(target: jax.ShapeDtypeStruct) -> jax.Array:
        nonlocal key
        key, one = jax.random.split(key)

        def make(key: jax.Array) -> jax.Array:
            if len(target.shape) == 1:
                return jnp.ones(target.shape, target.dtype)
            return jax.random.normal(key, target.shape, target.dtype) * jnp.asarray(STANDARD_DEVIATION, target.dtype)

        drawn: jax.Array = jax.jit(make, out_shardings=target.sharding)(one)
        return drawn.block_until_ready()

    return jax.tree.map(draw, spec.params)
