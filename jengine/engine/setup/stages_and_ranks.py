"""Stages of a pipeline and data-parallel ranks: their devices, layers and programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from jengine.base.errors import InvalidArgument
from jengine.base.progress import Progress
from jengine.core.config import EngineConfig
from jengine.core.device_options import PARTITION, PIPELINE, layer_numbers
from jengine.engine.setup.program_set import EarlyCompilation, ProgramSet
from jengine.execution.kinds import kind_of
from jengine.execution.programs import program_keys
from jengine.execution.ranks import RanksRunner, make_ranks
from jengine.execution.spec import ExecutionSpec
from jengine.models import Params
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


def check_ranks(config: EngineConfig, mesh: Mesh | None) -> None:
    """Raises InvalidArgument if an option does not work with several ranks."""
    count = config.data_parallel_size
    if count == 1:
        return
    if not config.enable_expert_parallel:
        limit = "must be 1 without enable_expert_parallel: only a server starts replicas"
        raise InvalidArgument("data_parallel_size", count, limit)
    refused: dict[str, Any] = {
        "mesh": mesh,
        "num_processes": config.num_processes > 1,
        "programs": config.programs,
        "weight_updates": config.weight_updates,
        "enable_lora": config.enable_lora,
        "record_trace": config.record_trace,
        "kv_events_config": config.page_events,
        "kv_transfer_config": config.kv_transfer,
        "num_scheduler_steps": config.burst_steps > 1,
        "speculative_config": config.draft_tokens,
    }
    for name, option in refused.items():
        if option:
            value = getattr(config, name, type(option).__name__)
            raise InvalidArgument(name, value, f"not with data_parallel_size={count}")


def prepare_ranks(
    config: EngineConfig,
    spec: ExecutionSpec,
    weights: Sequence[Params],
    max_bytes: int,
    progress: Progress,
    early: EarlyCompilation | None = None,
) -> tuple[RanksRunner, ProgramSet]:
    """The ranks of a spec, ready to be measured, and all their programs.

    Args:
        weights: of each stage.
        max_bytes: of the cache of programs.
        early: see ProgramSet.
    """
    keys = program_keys(spec)
    joint = [key for key in keys if kind_of(key).joint]
    apart = [key for key in keys if not kind_of(key).joint]
    each = [
        ProgramSet(config, spec.rank(rank), None, max_bytes, progress, only=apart, early=early)
        for rank in range(spec.ranks)
    ]
    programs = ProgramSet(config, spec, None, max_bytes, progress, only=joint, beside=each, early=early)
    return make_ranks(spec, programs.programs, weights, [part.programs for part in each]), programs
