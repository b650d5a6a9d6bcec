"""The stages of a pipeline: their devices and their layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.core.device_options import PARTITION, PIPELINE, layer_numbers
from jengine.execution.spec import ExecutionSpec
from jengine.models.cache import cache_groups
from jengine.models.stages import check_divisible, even_stages, layer_costs, stages_of


def with_stages(config: EngineConfig, spec: ExecutionSpec, meshes: Sequence[Mesh]) -> ExecutionSpec:
    """The spec divided into stages on these meshes, if there are several.

    Raises:
        InvalidArgument: the model cannot be divided so.
    """
    count, model = len(meshes), spec.model
    if count == 1:
        return spec
    if spec.images is not None:
        raise config.refused(f"with {PIPELINE}={count}: it then serves text alone")
    check_divisible(model, count)
    layers = layer_numbers(count, config.pipeline_layers)
    if layers is None:
        costs, head = layer_costs(model)
        layers = even_stages(costs, 0.0, head, count)
    elif sum(layers) != model.config.num_layers:
        raise InvalidArgument(
            PARTITION, layers, f"must add up to {model.config.num_layers}, the model's layers"
        )
    model = dataclasses.replace(model, groups=cache_groups(model.entries, spread=True))
    stages = tuple(zip(stages_of(model, layers), meshes, strict=True))
    return dataclasses.replace(spec, model=model, pipeline=stages)


def refuse_stages(config: EngineConfig, what: str) -> None:
    """Raises InvalidArgument if there are several stages, with which `what` does not work."""
    if (count := config.pipeline_parallel_size) > 1:
        raise InvalidArgument(PIPELINE, count, f"must be 1 with {what}")
