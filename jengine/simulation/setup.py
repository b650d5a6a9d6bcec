"""Derives the inputs of a replay from an engine's options. Loads and compiles nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jengine.config import EngineConfig
from jengine.devices.device_defaults import sizes
from jengine.engine.shapes import page_buckets
from jengine.engine.start import describe_engine, saved_costs
from jengine.errors import InvalidArgument
from jengine.execution.memory import claim_gpu_memory, device_bytes, pages_that_fit
from jengine.execution.spec import ExecutionSpec
from jengine.scheduling.block_table import GroupPages
from jengine.scheduling.costs import StepCosts
from jengine.scheduling.options import SchedulingOptions
from jengine.simulation.replay import EngineShape
from jengine.table.program_table import ProgramTable


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on this machine's devices with some options, and its step costs.

    Attributes:
        spec: shapes of the programs, without the number of pages.
    """

    config: EngineConfig
    spec: ExecutionSpec
    costs: StepCosts

    @classmethod
    def of(cls, config: EngineConfig, costs_file: Path | None = None) -> Setup:
        """Describes a model with these options.

        Args:
            costs_file: output of StepCosts.to_json(); None: costs that engines with these options have measured here.

        Raises:
            InvalidArgument: nothing was measured, or the file cannot be read. Other errors as in start_engine.
        """
        if config.burst_steps > 1:
            limit = "cannot be simulated yet: replays have single steps"
            raise InvalidArgument("num_scheduler_steps", config.num_scheduler_steps, limit)
        if config.batch_invariant:
            raise InvalidArgument("batch_invariant", True, "cannot be simulated yet: replays have steps of rows and prompts together")
        if config.swap_space:
            raise InvalidArgument("swap_space", config.swap_space, "must be 0: a host tier cannot be simulated yet")
        claim_gpu_memory(config.gpu_memory_utilization)
        config, spec = describe_engine(config)
        if spec.num_states:
            raise InvalidArgument("model", config.model, "cannot be simulated yet: it has recurrent states")
        if costs_file is None:
            costs = saved_costs(config, spec)
            if costs is None:
                limit = "nothing has been measured with these options on this machine: start an engine with them once, or give --costs"
                raise InvalidArgument("costs", None, limit)
        else:
            try:
                costs = StepCosts.from_json(costs_file.read_bytes())
            except (OSError, ValueError) as error:
                raise InvalidArgument("costs", str(costs_file), f"cannot be read: {error}") from None
        return cls(config, spec, costs)

    def shape(self, **changes: Any) -> EngineShape:
        """The shape of an engine with some options changed, which must be options of EngineConfig that affect
        scheduling.

        Costs of programs that were not measured are estimated from those that were.

        Raises:
            InvalidArgument: an option out of range.
        """
        config = dataclasses.replace(self.config, **changes)
        chosen = sizes(config, self.spec.mesh.devices.flat[0].platform)
        spec = dataclasses.replace(self.spec, max_slots=chosen.max_num_seqs, page_size=chosen.page_size)
        buckets = self.spec.table.page_buckets
        table = ProgramTable.build(
            max_num_seqs=chosen.max_num_seqs,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            tile_size=config.tile_size,
            page_buckets=buckets if len(buckets) == 1 else page_buckets(spec.table_width),
            paged_rows=self.spec.table.paged_rows,
            single_row=self.spec.table.row_buckets[0] == 1,
        )
        spec = dataclasses.replace(spec, table=table)
        return EngineShape(
            table=table,
            costs=self.costs if self.costs.table == table else self.costs.for_table(table),
            page_size=spec.page_size,
            num_pages=_pages(config, spec),
            max_num_seqs=spec.max_slots,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            max_model_len=spec.max_model_len,
            groups=[GroupPages(group.window, group.pool) for group in spec.groups],
            overlap=config.overlap,
            options={"prefix_caching": config.enable_prefix_caching, "options": SchedulingOptions.of(config)},
        )


def _pages(config: EngineConfig, spec: ExecutionSpec) -> int:
    """Number of pages of an engine whose weights are on the device."""
    pages = pages_that_fit(config, spec)
    if spec.mesh.devices.flat[0].platform == "cpu" or config.num_pages is not None or config.kv_cache_memory is not None:
        return pages
    return max(pages - device_bytes(spec.params) // spec.page_bytes, 2)
