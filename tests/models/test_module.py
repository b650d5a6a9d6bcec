"""Modules and the nested dicts of their parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jengine.models.module import Module, Param, bind, parameters


def param(size: int) -> Param[jax.ShapeDtypeStruct]:
    return Param(jax.ShapeDtypeStruct((size,), jnp.float32), (None,), (), matrix=False)


class Norm(Module):
    missing: Param[jax.ShapeDtypeStruct] | None = None

    def __init__(self, size: int) -> None:
        self.size, self.weight, self.bias = size, param(size), None


class Layers(Module):
    """Two attributes are one module, and one layer has no parameters."""

    def __init__(self) -> None:
        self.first = self.second = Norm(1)
        self.layers = [Norm(2), Module(), Norm(3)]
        self.sizes, self.head = [1, 2], param(4)


def test_parameters_by_name() -> None:
    found = parameters(Layers(), lambda parameter: parameter.value.shape[0])
    assert found == {"first": {"weight": 1}, "layers": {0: {"weight": 2}, 2: {"weight": 3}}, "head": 4}


def test_a_copy_has_the_values() -> None:
    declared = Layers()
    values = parameters(declared, lambda parameter: parameter.value.shape[0])
    bound = bind(declared, jax.tree.map(lambda size: 10 * size, values))
    assert bound.first is bound.second and bound.first.weight[...] == 10
    assert [norm.weight[...] for norm in bound.layers if isinstance(norm, Norm)] == [20, 30] and bound.head[...] == 40
    assert bound.first.bias is bound.first.missing is None and bound.sizes == [1, 2]
    assert parameters(declared, lambda parameter: parameter.value.shape[0]) == values, "the declaration is as before"
