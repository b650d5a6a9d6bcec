"""Where LoRA adapters fit into a model: derived from the declarations of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jengine.models.layers import Axes
from jengine.models.pieces import Piece
from pallas_kernels.weights import is_weight

if TYPE_CHECKING:
    from jengine.models import Model

PREFIXES = "model.", "language_model.", "model."  # of models with several parts, and of their text models


class Module(NamedTuple):
    """A module of the checkpoint that an adapter may change, such as `layers.0.self_attn.q_proj`.

    Attributes:
        shape: (outputs, inputs) in the checkpoint.
        pieces: its rows and columns, and their places in the parameter.
    """

    name: str
    shape: tuple[int, int]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class LoraWeights:
    """An adapter: a low-rank change b @ a of each module's weight.

    Attributes:
        rank: the largest.
        factors: by module: a [rank, in] and b [out, rank], float32. The scale is part of b.
    """

    rank: int
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]]


class Segment(NamedTuple):
    """Consecutive outputs of a parameter that belong to one module: `rows` of the second axis; None: all."""

    module: int
    rows: slice | None


@dataclass(frozen=True)
class Site:
    """A parameter that adapters may change.

    Attributes:
        index: among the model's parameters, quantized ones counted once.
        shape, axes: of the represented array [*out, in], and the logical names of its axes.
        modules: those that the parameter is made of.
        segments: of all modules, in the order of their rows.
    """

    index: int
    shape: tuple[int, ...]
    axes: Axes
    modules: tuple[Module, ...]
    segments: tuple[Segment, ...]

    def a_shape(self, columns: int) -> tuple[int, ...]:
        """Of `adapted.Stack.a`, for this many columns."""
        return len(self.modules), columns, self.shape[-1]

    def b_shapes(self, columns: int) -> list[tuple[int, ...]]:
        """Of `adapted.Stack.b`."""
        outs = self.shape[:-1]
        sizes = [None if rows is None else rows.stop - rows.start for _, rows in self.segments]
        return [(*(outs if size is None else (outs[0], size, *outs[2:])), columns) for size in sizes]

    @property
    def a_axes(self) -> Axes:
        return None, None, self.axes[-1]

    @property
    def b_axes(self) -> Axes:
        return *self.axes[:-1], None


def sites(model: Model) -> tuple[Site, ...]:
    """The parameters of a model that adapters may change: weights of dense products.

    Embeddings, output heads, experts and routers are none.
    """
    trees = (
        (model.params, is_weight),
        (model.axes, _is_tuple),
        (model.sources, _is_tuple),
        (model.adaptable, None),
    )
    leaves = [jax.tree.leaves(tree, is_leaf=is_leaf) for tree, is_leaf in trees]
    found = []
    for index, (parameter, axes, source, adaptable) in enumerate(zip(*leaves, strict=True)):
        modules = _modules(model.prefix, len(parameter.shape), source) if adaptable else ()
        if modules and (segments := _segments(modules, parameter.shape)):
            found.append(Site(index, tuple(parameter.shape), axes, modules, segments))
    return tuple(found)


def bare(name: str, prefix: str) -> str:
    """The name of a module or a tensor without the prefixes of decoders."""
    for one in (prefix, *PREFIXES):
        name = name.removeprefix(one)
    return name


def _modules(prefix: str, ndim: int, source: tuple[Piece, ...]) -> tuple[Module, ...]:
    """The modules of a parameter, or none if a low-rank change of one would not be one of the parameter."""
    found = []
    for name in dict.fromkeys(piece.name for piece in source):
        own = tuple(piece for piece in source if piece.name == name)
        rows = {repr((piece.part[: ndim - 1], piece.rows)) for piece in own}
        columns = {repr((piece.part[ndim - 1 :], piece.columns)) for piece in own}
        if len(own[0].shape) != 2 or not name.endswith(".weight") or (len(rows) > 1 and len(columns) > 1):
            return ()
        outs, inputs = own[0].shape[::-1] if own[0].transposed else own[0].shape
        found.append(Module(bare(name, prefix).removesuffix(".weight"), (outs, inputs), own))
    return tuple(found)


def _segments(modules: tuple[Module, ...], shape: tuple[int, ...]) -> tuple[Segment, ...]:
    """The segments of a parameter's modules, or none if these do not divide its second axis."""
    if len(modules) == 1:
        return (Segment(0, None),)
    runs: list[tuple[int, int, int]] = []  # start, stop, module
    for number, module in enumerate(modules):
        sides = {repr(side): side for side in (_second(piece, len(shape)) for piece in module.pieces)}
        if None in sides.values():
            return ()
        runs += [(*_ends(side, shape[1]), number) for side in sides.values()]  # type: ignore[arg-type]
    merged: list[tuple[int, int, int]] = []
    for start, stop, number in sorted(runs):
        if merged and merged[-1][1:] == (start, number):
            merged[-1] = (merged[-1][0], stop, number)
        else:
            merged.append((start, stop, number))
    if [start for start, _, _ in merged] + [shape[1]] != [0, *(stop for _, stop, _ in merged)]:
        return ()
    return tuple(Segment(number, slice(start, stop)) for start, stop, number in merged)


def _second(piece: Piece, ndim: int) -> int | slice | None:
    """A piece's part of the parameter's second axis, if that is one of outputs."""
    return piece.part[1] if ndim > 2 and len(piece.part) > 1 else None


def _ends(side: int | slice, size: int) -> tuple[int, int]:
    return (side, side + 1) if isinstance(side, int) else side.indices(size)[:2]


def _is_tuple(node: Any) -> bool:
    return isinstance(node, tuple)
