"""Models by stages of a pipeline: which layers and parameters each stage has."""

from __future__ import annotations

import dataclasses
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from flax import nnx

from jengine.base.errors import InvalidArgument
from jengine.models.pieces import pieces_of

if TYPE_CHECKING:
    from jengine.models import Model

OPTION = "pipeline_parallel_size"


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers of a model. The first stage has the embedding, the last one the final norm and the
    output head.

    Attributes:
        index, count: of the stage, and of all stages.
        start, stop: its layers.
    """

    index: int = 0
    count: int = 1
    start: int = 0
    stop: int = 0

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)


def check_divisible(model: Model, stages: int) -> None:
    """Raises InvalidArgument if a model cannot be divided into this many stages."""
    layers, why = model.config.num_layers, getattr(model.module, "indivisible", "")
    if why:
        raise InvalidArgument(OPTION, stages, f"must be 1 with {model.config.family}: {why}")
    if stages > layers:
        raise InvalidArgument(OPTION, stages, f"must be at most {layers}, the model's layers")


def even_stages(costs: list[float], entry: float, end: float, stages: int) -> tuple[int, ...]:
    """Numbers of layers by stage, so that the most expensive stage costs as little as possible. Among equals,
    the earlier stages have fewer layers, since the last one also samples.

    Args:
        costs: of each layer, in any unit.
        entry, end: what the first and the last stage have beside their layers.
    """
    sums, layers = [0.0, *accumulate(costs)], len(costs)

    def cost(start: int, stop: int, stage: int) -> float:
        beside = (entry if stage == 0 else 0.0) + (end if stage == stages - 1 else 0.0)
        return sums[stop] - sums[start] + beside

    # best[stop]: (cost of the most expensive stage so far, its sum of squares, where stages end)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {
        stop: (cost(0, stop, 0), cost(0, stop, 0) ** 2, (stop,)) for stop in range(1, layers + 1)
    }
    for stage in range(1, stages):
        best = {
            stop: min(
                (max(worst, seconds := cost(start, stop, stage)), squares + seconds**2, (*ends, stop))
                for start, (worst, squares, ends) in best.items()
                if start < stop
            )
            for stop in range(stage + 1, layers + 1)
        }
    return tuple(after - before for before, after in pairwise((0, *best[layers][2])))


def layer_costs(model: Model) -> tuple[list[float], float]:
    """Elements of matrices that a token uses: of each layer, and of the output head.

    A step reads them once, and multiplies each of its tokens by them, so its seconds grow with both.
    """
    each = max(model.elements.experts_per_token, 1)
    layers = [0.0] * model.config.num_layers
    declared: Any = nnx.to_flat_state(nnx.state(model.module))
    for path, parameter in declared:
        if path[0] == "layers" and parameter.get_metadata("multiplies"):
            shape, axes = parameter.get_value().shape, parameter.get_metadata("axes")
            count = 1.0
            for size, name in zip(shape, axes, strict=True):
                count *= min(each, size) if name == "experts" else size
            layers[path[1]] += count
    return layers, float(model.elements.head)


def stages_of(model: Model, layers: tuple[int, ...]) -> list[Stage]:
    """Stages with these numbers of layers."""
    ends = [0, *accumulate(layers)]
    return [Stage(i, len(layers), start, stop) for i, (start, stop) in enumerate(pairwise(ends))]


def part_of(model: Model, stage: Stage) -> Model:
    """The model with the parameters and the cache of one stage. Its layers keep their numbers, its groups of
    the cache too, so that block tables are the same in all stages.
    """
    module: Any = model.module
    tied = () if module.lm_head is not None else ("embed",)

    def own(tree: Any) -> Any:
        named = {}
        for name, value in tree.items():
            if name == "layers":
                if some := {i: value[i] for i in stage.layers if i in value}:
                    named[name] = some
            elif (stage.first and name in module.entry) or (
                stage.last and (name not in module.entry or name in tied)
            ):
                named[name] = value
        return named

    trees = {
        name: own(getattr(model, name)) for name in ("params", "axes", "sources", "matrices", "adaptable")
    }
    groups = tuple(
        dataclasses.replace(group, layers=tuple(i for i in group.layers if i in stage.layers))
        for group in model.groups
    )
    elsewhere = _tensors(model.sources) - _tensors(trees["sources"])
    return dataclasses.replace(
        model, **trees, groups=groups, stage=stage, elsewhere=elsewhere, absent=model.params
    )


def _tensors(sources: Any) -> frozenset[str]:
    return frozenset(piece.name for piece in pieces_of(sources))


def completed(part: Any, every: Any) -> Any:
    """A tree of parameters with the abstract ones in the place of those that it lacks."""
    if not isinstance(every, dict):
        return part
    return {name: completed(part[name], every[name]) if name in part else every[name] for name in every}
