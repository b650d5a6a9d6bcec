"""Where LoRA adapters fit into a model: derived from the declarations of its weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np

from jengine.base.errors import InvalidArgument
from jengine.models.layers import Axes
from jengine.models.moe import MixtureOfExperts
from jengine.models.pieces import Piece, pieces_of
from pallas_kernels.products.weights import is_weight

if TYPE_CHECKING:
    from jengine.models import Model

# of models with several parts, and of their text models
PREFIXES = "model.", "language_model.", "text_model.", "model."
EXPERT = re.compile(r"\.experts\.\d+")


Role = Literal["dense", "experts", "table", "head"]  # a head computes logits


class Module(NamedTuple):
    """A module of the checkpoint that an adapter may change, such as `layers.0.self_attn.q_proj`.

    Attributes:
        shape: (outputs, inputs) in the checkpoint.
        pieces: its rows and columns, and their places in the parameter.
    """

    name: str
    shape: tuple[int, int]
    pieces: tuple[Piece, ...]


Factors = tuple[np.ndarray, np.ndarray]  # a [rank, in] and b [out, rank]


@dataclass(frozen=True)
class LoraWeights:
    """An adapter: a low-rank change b @ a of each module's weight.

    Attributes:
        rank: the largest.
        factors: by module: a [rank, in] and b [out, rank], in the model's dtype. The scale is part of b.
    """

    rank: int
    factors: Mapping[str, Factors]


class Segment(NamedTuple):
    """Consecutive outputs of a parameter that belong to one module: `rows` of the second axis; None: all."""

    module: int
    rows: slice | None


@dataclass(frozen=True)
class Site:
    """A parameter that adapters may change.

    Attributes:
        index: among the model's parameters, quantized ones counted once.
        shape, axes: of the represented array [*out, in], or [experts, *out, in], and the logical names of its
            axes.
        role: what it is used for. A table that is also the head has a site for each.
        experts: how many matrices it has; None: it is one.
        modules: those that the parameter is made of, in the order of experts.
        segments: of an expert's modules, in the order of their rows. Those of all experts are alike.
        chosen: experts that a token uses.
    """

    index: int
    shape: tuple[int, ...]
    axes: Axes
    role: Role
    experts: int | None
    modules: tuple[Module, ...]
    segments: tuple[Segment, ...]
    chosen: int = 1

    @property
    def parts(self) -> int:
        """Modules of the matrix, or of each expert."""
        return len(self.modules) // (self.experts or 1)

    @property
    def first(self) -> tuple[int, ...]:
        """The axis of experts, if there is one, with padding."""
        return () if self.experts is None else (self.shape[0],)

    def a_shape(self, columns: int) -> tuple[int, ...]:
        """Shape of `adapted.Stack.a` for this many columns."""
        return *self.first, self.parts, columns, self.shape[-1]

    def b_shapes(self, columns: int) -> list[tuple[int, ...]]:
        """Shapes of `adapted.Stack.b`."""
        first, outs = self.first, self.shape[len(self.first) : -1]
        sizes = [None if rows is None else rows.stop - rows.start for _, rows in self.segments]
        return [(*first, *(outs if size is None else (outs[0], size, *outs[2:])), columns) for size in sizes]

    def rows(self, segment: Segment) -> tuple[slice, ...]:
        """The index of a segment's part of the parameter."""
        if segment.rows is None:
            return ()
        return *[slice(None)] * (1 + len(self.first)), segment.rows

    @property
    def fused(self) -> str | None:
        """The name that transformers gives to the parameter with all experts; None: there are none."""
        if self.experts is None:
            return None
        return (
            f"{EXPERT.split(self.modules[0].name)[0]}.experts.{'down' if self.parts == 1 else 'gate_up'}_proj"
        )

    @property
    def a_axes(self) -> Axes:
        return *self.axes[: len(self.first)], None, None, self.axes[-1]

    @property
    def b_axes(self) -> Axes:
        return *self.axes[:-1], None


def sites(model: Model, targets: Sequence[str] | None = None) -> tuple[Site, ...]:
    """The parameters of a model that adapters may change.

    Args:
        targets: components of modules' names, one or several joined by dots; parameters that have such a
            module. None: the matrices of dense products.

    Raises:
        InvalidArgument: the model has no module of a target.
    """
    trees = (
        (model.params, is_weight),
        (model.axes, _is_tuple),
        (model.sources, _is_tuple),
        (model.adaptable, None),
    )
    leaves = [jax.tree.leaves(tree, is_leaf=is_leaf) for tree, is_leaf in trees]
    paths = [path for path, _ in jax.tree.leaves_with_path(model.params, is_leaf=is_weight)]
    out, named = [], set()
    for index, (path, (parameter, axes, source, adaptable)) in enumerate(
        zip(paths, zip(*leaves, strict=True), strict=True)
    ):
        every = _modules(model.prefix, len(parameter.shape), source) if adaptable else ()
        for role, modules in _roles(model, path[0].key, axes, every):
            experts = model.config.part(MixtureOfExperts).count if role == "experts" else None
            segments = _segments(modules, parameter.shape, experts) if modules else ()
            if not segments:
                continue
            matching = {target for target in targets or () if any(_has(module, target) for module in modules)}
            if matching if targets is not None else role == "dense":
                chosen = 1 if experts is None else model.config.part(MixtureOfExperts).per_token
                shape = tuple(parameter.shape)
                out.append(Site(index, shape, axes, role, experts, modules, segments, chosen))
            named |= matching
    if missing := sorted({*(targets or ())} - named):
        raise InvalidArgument("lora_target_modules", missing[0], "must name modules that adapters may change")
    return tuple(out)


def module_names(model: Model) -> set[str]:
    """Bare names of all modules with a matrix, except those of experts: some releases of transformers have
    parameters of all experts in their place.
    """
    names = {bare(piece.name, model.prefix) for piece in pieces_of(model.sources) if len(piece.shape) == 2}
    matrices = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    return {name for name in matrices if not EXPERT.search(name)} | {"lm_head"}


def _roles(
    model: Model, name: str, axes: Axes, modules: tuple[Module, ...]
) -> Iterator[tuple[Role, tuple[Module, ...]]]:
    """What a parameter is used for, and its modules for each use."""
    if axes[0] != "vocab":
        yield "experts" if axes[0] == "experts" else "dense", modules
    elif name == "lm_head":
        yield "head", modules
    else:
        yield "table", modules
        if name == "embed" and model.module.lm_head is None:
            yield "head", tuple(module._replace(name="lm_head") for module in modules)


def _has(module: Module, target: str) -> bool:
    """Whether a target is in a module's name, in which experts have no number."""
    return f".{target}." in f".{EXPERT.sub('.experts', module.name)}."


def bare(name: str, prefix: str) -> str:
    """The name of a module or a tensor without the prefixes of decoders."""
    for start in (prefix, *PREFIXES):
        name = name.removeprefix(start)
    return name


def _modules(prefix: str, ndim: int, source: tuple[Piece, ...]) -> tuple[Module, ...]:
    """The modules of a parameter, or none if a low-rank change of one would not be one of the parameter."""
    modules = []
    for name in dict.fromkeys(piece.name for piece in source):
        pieces = tuple(piece for piece in source if piece.name == name)
        rows = {repr((piece.part[: ndim - 1], piece.rows)) for piece in pieces}
        columns = {repr((piece.part[ndim - 1 :], piece.columns)) for piece in pieces}
        if len(pieces[0].shape) != 2 or not name.endswith(".weight") or (len(rows) > 1 and len(columns) > 1):
            return ()
        outs, inputs = pieces[0].shape[::-1] if pieces[0].transposed else pieces[0].shape
        modules.append(Module(bare(name, prefix).removesuffix(".weight"), (outs, inputs), pieces))
    return tuple(modules)


def _segments(
    modules: tuple[Module, ...], shape: tuple[int, ...], experts: int | None
) -> tuple[Segment, ...]:
    """The segments of a parameter's modules, or none if these do not divide its second axis, the one after
    an axis of experts.
    """
    first = 0 if experts is None else 1
    if experts is not None:
        modules = tuple(module for module in modules if module.pieces[0].part[:1] == (0,))
    if len(modules) == 1:
        return (Segment(0, None),)
    shape = shape[first:]
    runs: list[tuple[int, int, int]] = []  # start, stop, module
    for number, module in enumerate(modules):
        sides = {repr(side): side for side in (_second(p.part[first:], len(shape)) for p in module.pieces)}
        if None in sides.values():
            return ()
        runs += [(*_ends(side, shape[1]), number) for side in sides.values()]  # type: ignore[arg-type]
    merged: list[tuple[int, int, int]] = []
    for start, stop, number in sorted(runs):
        if merged and merged[-1][1:] == (start, number):
            merged[-1] = (merged[-1][0], stop, number)
        else:
            merged.append((start, stop, number))
    if not merged or [start for start, _, _ in merged] + [shape[1]] != [0, *(stop for _, stop, _ in merged)]:
        return ()
    return tuple(Segment(number, slice(start, stop)) for start, stop, number in merged)


def _second(part: tuple[int | slice, ...], ndim: int) -> int | slice | None:
    """A piece's part of a matrix's second axis, if that is one of outputs."""
    return part[1] if ndim > 2 and len(part) > 1 else None


def _ends(side: int | slice, size: int) -> tuple[int, int]:
    return (side, side + 1) if isinstance(side, int) else side.indices(size)[:2]


def _is_tuple(node: Any) -> bool:
    return isinstance(node, tuple)
