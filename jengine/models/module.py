"""Modules: parameters are declared as attributes, and read as arrays once the module is bound to some."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax

from jengine.models.pieces import Piece

Axes = tuple[str | None, ...]  # logical names, one for each axis; parallel/mesh.py says which are sharded
Tree = dict[Any, Any]  # nested: attributes by name, items of a list by index


@dataclass(frozen=True, slots=True)
class Param:
    """A declared parameter.

    Attributes:
        value: shape and dtype.
        source: the checkpoint's tensors that it is made of.
        matrix: [*out, in] and used by `dense` and `lookup` alone, which take it quantized too.
    """

    value: jax.ShapeDtypeStruct
    axes: Axes
    source: tuple[Piece, ...]
    matrix: bool


class Module:
    """Holds parameters, other modules and lists of modules as attributes, besides whatever else it needs."""

    def tree(self, leaf: Callable[[Param], Any]) -> Tree:
        """What `leaf` gives for each parameter declared here or in modules below."""
        found = {name: _tree(value, leaf) for name, value in vars(self).items()}
        return {name: value for name, value in found.items() if value is not None}

    def bind(self, params: Tree) -> Self:
        """A copy whose attributes are these arrays, a tree like `tree`'s, where parameters were declared."""
        bound = copy.copy(self)
        for name, value in params.items():
            setattr(bound, name, _bound(getattr(self, name), value))
        return bound


def _tree(value: Any, leaf: Callable[[Param], Any]) -> Any:
    """None where no parameters are."""
    match value:
        case Param():
            return leaf(value)
        case Module():
            return value.tree(leaf) or None
        case list():
            return {i: tree for i, item in enumerate(value) if (tree := _tree(item, leaf)) is not None} or None
    return None


def _bound(value: Any, params: Any) -> Any:
    match value:
        case Param():
            return params
        case Module():
            return value.bind(params)
    return [_bound(item, params[i]) if i in params else item for i, item in enumerate(value)]
