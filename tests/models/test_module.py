"""Modules: what they declare, and what they are bound to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jengine.models.layers import param
from jengine.models.module import Module


class Leaf(Module):
    def __init__(self, size: int) -> None:
        self.size = size
        self.weight: Any = param((size,), jnp.float32, (None,))
        self.bias: Any = None

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.weight


class Top(Module):
    def __init__(self) -> None:
        self.scale: Any = param((1,), jnp.float32, ("vocab",))
        self.layers: list[Any] = [Leaf(2), Module(), Leaf(3)]
        self.names = ["no", "parameters"]
        self.empty = Module()


def test_a_tree_has_what_is_declared_and_nothing_else() -> None:
    top = Top()
    assert top.tree(lambda p: p.value.shape) == {"scale": (1,), "layers": {0: {"weight": (2,)}, 2: {"weight": (3,)}}}
    assert top.tree(lambda p: p.axes)["scale"] == ("vocab",)


def test_a_bound_module_reads_arrays_and_leaves_the_declaration_alone() -> None:
    top = Top()
    arrays = jax.tree.map(lambda x: 2 * jnp.ones(x.shape), top.tree(lambda p: p.value))
    bound = top.bind(arrays)
    assert bound.layers[2](jnp.ones(3)).tolist() == [2, 2, 2]
    assert bound.scale is arrays["scale"]
    assert bound.layers[0].bias is None and bound.layers[0].size == 2 and bound.names == top.names
    assert top.tree(lambda p: p.value.shape)["layers"][2] == {"weight": (3,)}
