"""Modules: objects that hold parameters, and the nested dict of a module's parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from jengine.models.pieces import Piece


@dataclass(frozen=True, slots=True, eq=False)
class Param[T]:
    """A parameter.

    Attributes:
        value: a jax.ShapeDtypeStruct where a model is declared, an array or a quantized weight where it is bound.
        axes: logical axis names, or None for each axis that no mesh axis shards.
        source: the checkpoint tensors that make it up.
        matrix: whether it may be quantized.
    """

    value: T
    axes: tuple[str | None, ...]
    source: tuple[Piece, ...]
    matrix: bool

    def __getitem__(self, everything: Any) -> T:
        """parameter[...] is its value."""
        assert everything is Ellipsis
        return self.value


class Module:
    """A part of a model. Its attributes are parameters, modules, lists of modules, and plain values."""


def parameters(module: object, leaf: Callable[[Param[Any]], Any]) -> dict[Any, Any]:
    """A nested dict with `leaf(parameter)` for each parameter: by attribute, and by index within a list. What is in several places
    counts in the first."""
    return _parameters(module, leaf, set())


def bind[M](module: M, values: dict[Any, Any]) -> M:
    """A copy of a module with these values, a dict as `parameters` returns it."""
    bound: M = _bound(module, values, {})
    return bound


def _parameters(node: object, leaf: Callable[[Param[Any]], Any], seen: set[int]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, child in _children(node):
        if id(child) in seen:
            continue
        seen.add(id(child))
        if isinstance(child, Param):
            found[name] = leaf(child)
        elif inner := _parameters(child, leaf, seen):
            found[name] = inner
    return found


def _bound(node: Any, values: dict[Any, Any], known: dict[int, Any]) -> Any:
    """known: what is bound already, by the identity of the original."""
    bound = copy.copy(node)
    for name, child in _children(node):
        if id(child) not in known:
            whole = isinstance(child, Param)
            known[id(child)] = replace(child, value=values[name]) if whole else _bound(child, values.get(name, {}), known)
        if isinstance(node, list):
            bound[name] = known[id(child)]
        else:
            setattr(bound, name, known[id(child)])
    return bound


def _children(node: object) -> Iterable[tuple[Any, Any]]:
    named = enumerate(node) if isinstance(node, list) else vars(node).items()
    return [(name, child) for name, child in named if isinstance(child, Param | Module | list)]
