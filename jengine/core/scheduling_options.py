"""Options for order, batching and targets of requests: the plain-data part of EngineConfig that scheduling
needs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

Policy = Literal["fcfs", "priority", "fair"]
StrategyName = Literal["throughput", "latency", "memory", "auto"]
Batching = Literal["continuous", "dynamic", "static"]
OnLate = Literal["serve", "reject"]

STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """Fields as in EngineConfig."""

    policy: Policy = "fcfs"
    priority_ageing: float = 60.0  # seconds
    strategy: StrategyName = "throughput"
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    on_late: OnLate = "serve"
    batching: Batching = "continuous"
    batch_wait_ms: float = 50.0
    batch_invariant: bool = False
    num_scheduler_steps: int | str | None = None
    speculative_config: dict[str, Any] | str | None = None
    pipeline_parallel_size: int = 1

    @property
    def strategies(self) -> tuple[StrategyName, ...]:
        """Strategies that work with the batching mode.

        Targets cannot be met if requests wait for a batch, or if prompts and rows take turns. With several
        stages, times between tokens are not predicted.
        """
        return (
            STRATEGIES
            if self.batching == "continuous" and not self.batch_invariant and self.pipeline_parallel_size == 1
            else ("throughput", "memory")
        )

    @classmethod
    def of(cls, config: object) -> SchedulingOptions:
        """Copies the fields of an EngineConfig. A pipeline drafts nothing."""
        options = cls(**{field.name: getattr(config, field.name) for field in fields(cls)})
        return options if options.pipeline_parallel_size == 1 else replace(options, speculative_config=None)
