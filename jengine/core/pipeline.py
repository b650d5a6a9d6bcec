"""The options of pipeline parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jengine.base.errors import InvalidArgument

NAME, PARTITION = "pipeline_parallel_size", "pipeline_layers"


def layer_numbers(stages: int, given: Any) -> tuple[int, ...] | None:
    """The numbers of layers by stage that an option gives, as a list or as text with commas between them.

    Raises:
        InvalidArgument: they are not as many whole numbers, from 1, as there are stages.
    """
    if given is None:
        return None
    parts = given.split(",") if isinstance(given, str) else given
    limit = f"must be {stages} numbers of layers, one for each stage, such as 16,16"
    try:
        if not isinstance(parts, Sequence) or any(isinstance(part, bool | float) for part in parts):
            raise ValueError
        numbers = tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        raise InvalidArgument(PARTITION, given, limit) from None
    if len(numbers) != stages or min(numbers) < 1:
        raise InvalidArgument(PARTITION, given, limit)
    return numbers


def check_pipeline(config: Any) -> None:
    """Checks that an EngineConfig with several stages has no option that a pipeline lacks.

    Raises:
        InvalidArgument: one of them is set.
    """
    stages = config.pipeline_parallel_size
    if stages == 1:
        return
    many = f"with {NAME}={stages}"
    drafts = "drafts follow a sequence's last token, which would have to be read before each of its steps"
    for name, refused, why in (
        ("num_scheduler_steps", (8,), f"must be 1 or auto {many}: a burst is one program of all layers"),
        ("enable_lora", (True,), f"must be False {many}: adapters are not divided into stages"),
        ("weight_updates", (True,), f"must be False {many}: weights are not divided while it runs"),
        ("strategy", ("latency", "auto"), f"must be throughput or memory {many}: targets are not predicted"),
    ):
        if getattr(config, name) in refused:
            raise InvalidArgument(name, getattr(config, name), why)
    for name in ("calibration_data", "programs", "kv_transfer_config"):
        if getattr(config, name) is not None:
            raise InvalidArgument(name, str(getattr(config, name)), f"must be None {many}")
    if config.speculative_config not in ("auto", "none", None):
        raise InvalidArgument(
            "speculative_config", config.speculative_config, f"must be auto or none {many}: {drafts}"
        )
