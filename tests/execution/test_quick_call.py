"""QuickCall gives what the compiled program gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jengine.execution.programs import QuickCall
from jengine.parallel.mesh import make_mesh

WHOLE = NamedSharding(make_mesh(1), PartitionSpec())


def compiled(function: Any, *args: Any, **options: Any) -> jax.stages.Compiled:
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=WHOLE), args)
    return jax.jit(function, out_shardings=WHOLE, **options).lower(*like).compile()


def step(weights: Any, state: Any, packed: Any) -> Any:
    """Uses one of its weights, and updates the state."""
    return {"state": (state[0] + 1, state[1] * 2)}, weights[1] * packed[0]


def test_calls_give_what_the_compiled_program_gives_and_states_are_updated_in_place() -> None:
    weights = tuple(jax.device_put(jnp.full((2, 2), i, jnp.float32), WHOLE) for i in range(3))
    state = tuple(jax.device_put(jnp.full(4, i, jnp.float32), WHOLE) for i in range(2))
    packed = np.arange(5, 8, dtype=np.int32)
    program = compiled(step, weights, state, packed, donate_argnums=1)
    call, expected = QuickCall(program), state
    for i in range(4):
        wanted, result = program(weights, jax.tree.map(jnp.copy, expected), packed + i)
        expected, given = wanted["state"], state
        outs, found = call(weights, state, packed + i)
        state = outs["state"]
        assert all(array.is_deleted() for array in given)
        np.testing.assert_array_equal(found, result)
        jax.tree.map(np.testing.assert_array_equal, state, expected)
        assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, expected)


def test_arrays_of_the_device_and_of_the_host_may_take_turns() -> None:
    weights = (jax.device_put(jnp.ones(3), WHOLE),)
    call = QuickCall(compiled(lambda weights, x: weights[0] + x, weights, np.zeros(3, np.float32)))
    for x in (np.ones(3, np.float32), jax.device_put(jnp.full(3, 2.0), WHOLE), np.full(3, 3, np.float32)):
        np.testing.assert_array_equal(call(weights, x), 1 + np.asarray(x))


def test_other_weights_of_the_same_shapes_take_the_place_of_the_first() -> None:
    call = QuickCall(compiled(lambda weights, x: weights[0] * x, (jnp.ones(2),), np.zeros(2, np.float32)))
    for value in (2.0, 3.0, 4.0):
        weights = (jax.device_put(jnp.full(2, value), WHOLE),)
        np.testing.assert_array_equal(call(weights, np.ones(2, np.float32)), [value, value])


@pytest.mark.parametrize("array", [np.zeros(3, np.float32), np.zeros(2, np.int32)])
def test_an_array_of_the_host_with_another_shape_or_dtype_is_refused(array: np.ndarray) -> None:
    weights = (jax.device_put(jnp.ones(2), WHOLE),)
    call = QuickCall(compiled(lambda weights, x: weights[0] * x, weights, np.zeros(2, np.float32)))
    with pytest.raises(TypeError):  # the first call compares all arguments
        call(weights, array)
    call(weights, np.ones(2, np.float32))
    with pytest.raises(TypeError, match=r"argument 1 is .*; the program takes float32\[2\]"):
        call(weights, array)
