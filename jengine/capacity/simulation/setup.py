"""Derives the inputs of a replay from an engine's options. Loads and compiles nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jengine.base.errors import InvalidArgument
from jengine.capacity.simulation.replay import EngineShape
from jengine.core.config import EngineConfig
from jengine.core.speculation import Speculation
from jengine.devices.device_defaults import sizes
from jengine.engine.setup.program_set import saved_costs
from jengine.engine.setup.shapes import (
    describe_engine,
    host_pages,
    make_table,
    page_buckets,
    scheduler_shapes,
    states,
)
from jengine.execution.memory import claim_gpu_memory, device_bytes, pages_that_fit
from jengine.execution.spec import ExecutionSpec
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.drafters.drafter import Draft, Drafter
from jengine.scheduling.requests.sequence import Sequence

WRONG = 2**31 - 1  # a token that no simulated request generates
SIXTEEN_BITS = 1 << 16


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on this machine's devices with some options, and its step costs.

    Attributes:
        spec: shapes of the programs, without the number of pages.
        drafts_right: assumed share of drafted tokens that are right; 0: no drafts.
        given: whether the costs are a file's, and not those that engines have measured here.
    """

    config: EngineConfig
    spec: ExecutionSpec
    costs: StepCosts
    drafts_right: float = 0.0
    given: bool = False

    @classmethod
    def of(cls, config: EngineConfig, costs_file: Path | None = None, drafts_right: float = 0.0) -> Setup:
        """Describes a model with these options.

        Args:
            drafts_right: see the class.
            costs_file: output of StepCosts.to_json(); None: costs that engines with these options have
                measured here.

        Raises:
            InvalidArgument: nothing was measured, or the file cannot be read. Other errors as in
                start_engine.
        """
        if not 0.0 <= drafts_right <= 1.0:
            raise InvalidArgument("drafts_right", drafts_right, "must be from 0 to 1")
        if drafts_right and config.draft_tokens:
            raise InvalidArgument(
                "drafts_right", drafts_right, "must be 0 with a draft model, which simulations do not run"
            )
        claim_gpu_memory(config.gpu_memory_utilization)
        config, spec = describe_engine(config)
        if costs_file is None:
            costs = saved_costs(config, spec)
            if costs is None:
                limit = (
                    "nothing has been measured with these options on this machine: start an engine with them"
                    " once, or give --costs"
                )
                raise InvalidArgument("costs", None, limit)
        else:
            try:
                costs = StepCosts.from_json(costs_file.read_bytes())
            except (OSError, ValueError) as error:
                raise InvalidArgument("costs", str(costs_file), f"cannot be read: {error}") from None
        return cls(config, spec, costs, drafts_right, given=costs_file is not None)

    def shape(self, **changes: Any) -> EngineShape:
        """The shape of an engine with some options changed, which must be options of EngineConfig that affect
        scheduling.

        Its costs are those that an engine with these options has measured here. Without such an engine,
        costs of programs that were not measured are estimated from those that were.

        Raises:
            InvalidArgument: an option out of range.
        """
        config = dataclasses.replace(self.config, **changes)
        platform = self.spec.mesh.devices.flat[0].platform
        chosen, buckets = sizes(config, platform), self.spec.table.page_buckets
        spec = dataclasses.replace(
            self.spec,
            max_slots=chosen.max_num_seqs,
            page_size=chosen.page_size,
            **states(config, self.spec.model, chosen.max_num_seqs, platform),
        )
        if config.swap_space:
            spec = dataclasses.replace(spec, host_pages=host_pages(config, spec))
        if len(buckets) > 1:
            buckets = page_buckets(spec.table_width, config.batch_invariant)
        table = make_table(config, chosen, platform)
        table = dataclasses.replace(table, page_buckets=buckets, paged_rows=self.spec.table.paged_rows)
        spec = dataclasses.replace(spec, table=table)
        saved = None if self.given else saved_costs(config, spec)
        known = saved or (self.costs if self.costs.table == table else self.costs.for_table(table))
        alike = spec.page_size == self.spec.page_size and table.tile_size == self.spec.table.tile_size
        spec = dataclasses.replace(spec, num_pages=_pages(config, spec))
        cache, limits = scheduler_shapes(config, spec)
        speculation, drafters = Speculation.of(config.speculative_config), None
        if speculation is not None and self.drafts_right:
            drafters = [AssumedDrafts(self.drafts_right, speculation.num_speculative_tokens)]
        return EngineShape(
            table=table,
            cache=cache,
            limits=dataclasses.replace(limits, through_host=False),  # of one process
            costs=known,
            # simulated tokens say nothing about drafts
            options=dataclasses.replace(config, speculative_config=None),
            drafters=drafters,
            overlap=config.overlap,
            # no trunk that its own table lacks has an estimated cost
            measured=saved is not None
            or (alike and {*table.trunks()} <= {*self.spec.table.trunks(), *known.known}),
        )


def _pages(config: EngineConfig, spec: ExecutionSpec) -> int:
    """Number of pages of an engine whose weights are on the device, as many as fit in every stage."""
    return min(_stage_pages(config, stage) for stage in spec.stages if stage.page_bytes)


def _stage_pages(config: EngineConfig, spec: ExecutionSpec) -> int:
    pages = pages_that_fit(config, spec)
    if (
        spec.mesh.devices.flat[0].platform == "cpu"
        or config.num_pages is not None
        or config.kv_cache_memory is not None
    ):
        return pages
    return max(pages - device_bytes(spec.weights) // spec.page_bytes, 2)


class AssumedDrafts(Drafter):
    """Proposes tokens of which a given share is right.

    A simulated request generates one token again and again, so its last one is known to be the next. Which
    drafts are right depends on the request and the position alone.

    Args:
        right: share of drafts that are right, given that all before them are.
        max_drafts: see Drafter.
    """

    def __init__(self, right: float, max_drafts: int) -> None:
        super().__init__(max_drafts)
        self._right = right * SIXTEEN_BITS

    def draft(self, sequence: Sequence, limit: int) -> Draft | None:
        at, number = len(sequence.tokens), sequence.number
        if at == sequence.prompt_len:
            return None
        token = sequence.tokens[-1]
        return Draft(
            [
                token if hash((number, position)) % SIXTEEN_BITS < self._right else WRONG
                for position in range(at, at + limit)
            ],
            source="assumed",
        )
