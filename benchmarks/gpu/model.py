"""Models without a checkpoint, with random weights created on the device, and the programs that a benchmark
needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jengine.execution.device_state import ALLOCATE
from jengine.execution.kinds import Key
from jengine.execution.programs import callable_of, compile_all
from jengine.execution.spec import ExecutionSpec
from tools.make_model import STANDARD_DEVIATION


class Chosen(dict[Key, Any]):
    """A replacement for Programs that contains only the needed ones, by key, with the costs that warm-up
    measures.
    """

    def __init__(self, programs: dict[Key, Any]) -> None:
        super().__init__(programs)
        self.costs: dict[str, float] = {}


def compiled(spec: ExecutionSpec, threads: int) -> Chosen:
    """Compiles all trunks and their greedy samplers."""
    table = spec.table
    samplers = dict.fromkeys(table.sampler(key, "greedy") for key in table.trunks())
    keys: Iterable[Key] = [ALLOCATE, *table.trunks(), *samplers]
    return Chosen(
        {
            built.key: callable_of(built.key, built.program)
            for built in compile_all(spec, list(keys), threads=threads, progress=False)
        }
    )


def random_params(spec: ExecutionSpec) -> Any:
    """Random parameters, created one at a time. Norms are ones; others are normal, as in
    tools/make_model.py.
    """
    key = jax.random.key(0)

    def draw(target: jax.ShapeDtypeStruct) -> jax.Array:
        nonlocal key
        key, one = jax.random.split(key)

        def make(key: jax.Array) -> jax.Array:
            if len(target.shape) == 1:
                return jnp.ones(target.shape, target.dtype)
            return jax.random.normal(key, target.shape, target.dtype) * jnp.asarray(
                STANDARD_DEVIATION, target.dtype
            )

        drawn: jax.Array = jax.jit(make, out_shardings=target.sharding)(one)
        return drawn.block_until_ready()

    return jax.tree.map(draw, spec.params)
