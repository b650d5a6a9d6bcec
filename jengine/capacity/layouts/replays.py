"""Plays a trace on a layout: the real scheduler with the layout's costs instead of measured ones.

The stages of a pipeline have a step of their own each, as in an engine. One virtual engine stands for all
data ranks, which have equal parts of a step's rows, tokens and pages.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jengine.base.display import columns
from jengine.base.errors import OutOfMemory
from jengine.capacity.layouts.choice import Candidate
from jengine.capacity.layouts.serving import Serving
from jengine.capacity.layouts.step import Batch, LayoutCosts
from jengine.capacity.planning.roofline import cached_bytes, cached_operations
from jengine.capacity.simulation.outcome import Outcome
from jengine.capacity.simulation.replay import EngineShape, replay
from jengine.capacity.simulation.setup import Setup
from jengine.capacity.simulation.summary import ReplaySummary, Targets, summarize
from jengine.capacity.simulation.trace import RequestTrace
from jengine.core.config import EngineConfig
from jengine.core.request import SamplingParams
from jengine.scheduling.costs.step_costs import Slopes, StepCosts
from jengine.table.program_table import ProgramTable


@dataclass(frozen=True)
class Replayed:
    """A layout with what a trace gave on it."""

    candidate: Candidate
    outcome: Outcome
    summary: ReplaySummary

    @property
    def per_device(self) -> float:
        """Output tokens a second of each device."""
        return self.summary.output_tokens_per_second / self.candidate.deployment.devices


def replayed(
    config: EngineConfig,
    candidate: Candidate,
    trace: RequestTrace,
    targets: Targets,
    *,
    params: SamplingParams | None = None,
    drafts_right: float = 0.0,
    progress: bool = False,
) -> Replayed:
    """Plays a trace on a layout.

    Args:
        config: the engine's options. By default, engines run as many sequences at a time as the plan says.

    Raises:
        OutOfMemory: the layout does not serve the plan's traffic.
    """
    shape = shape_of(config, candidate, drafts_right)
    replicas = candidate.deployment.replicas
    outcome = replay(shape, trace, replicas=replicas, params=params, progress=progress)
    return Replayed(candidate, outcome, summarize(outcome, trace, targets))


def ranked(replays: list[Replayed]) -> list[Replayed]:
    """The best first: the most requests answered, then within targets, then the shortest time in total."""
    return sorted(
        replays,
        key=lambda one: (one.summary.unanswered, -(one.summary.in_target or 0.0), one.summary.mean_total),
    )


def shape_of(config: EngineConfig, candidate: Candidate, drafts_right: float = 0.0) -> EngineShape:
    """The shape of one engine of a deployment."""
    if candidate.best is None:
        raise OutOfMemory(f"{candidate.deployment} does not serve this traffic")
    costs, spec = candidate.serving.costs, candidate.spec
    if config.max_num_seqs is None:
        config = dataclasses.replace(config, max_num_seqs=candidate.best.sequences)
    else:
        rows = config.max_num_seqs * costs.layout.data * costs.layout.stages
        config = dataclasses.replace(config, max_num_seqs=rows)
    pages = 1 + costs.layout.data * candidate.memory.pages
    config = dataclasses.replace(config, num_pages=pages, kv_cache_memory=None)
    table = Setup(config, spec, StepCosts(spec.table)).shape().table
    shape = Setup(config, spec, step_costs(candidate.serving, table), drafts_right).shape()
    return dataclasses.replace(shape, options={**shape.options, "stages": costs.layout.stages})


def step_costs(serving: Serving, table: ProgramTable) -> StepCosts:
    """What the programs of a table cost in each stage of a layout. Samplers are part of the trunks."""
    slopes = slopes_of(serving.costs)
    known = {
        trunk: _base(serving, slopes, trunk.rows, trunk.tiles * table.tile_size) for trunk in table.trunks()
    }
    return StepCosts(table, {**known, **dict.fromkeys(table.samplers(), 0.0)}, slopes=slopes)


def slopes_of(costs: LayoutCosts) -> Slopes:
    """Seconds of a stage's step for each cached token of a row, and for each pair of a prompt's tokens. The
    data ranks compute them side by side.
    """
    model, formats, layout, device = costs.model, costs.formats, costs.layout, costs.cluster.device
    one = {layer: 1.0 for layer, entry in enumerate(model.entries) if entry.kind != "state"}
    none = cached_operations(model, dict.fromkeys(one, 0.0))
    pair = (cached_operations(model, one) - none) / layout.tensor / device.rates[formats.dtype]
    read = cached_bytes(model, formats, one) / device.bandwidth if one else 0.0
    share = max(costs.layers) / sum(costs.layers) / layout.data
    return Slopes(max(read, pair) * share, 0.0, pair * share)


def _base(serving: Serving, slopes: Slopes, rows: int, tokens: int) -> float:
    """Seconds of a stage without attention: a token of a prompt attends to half of it on average."""
    prompt = max(1, min(tokens, serving.traffic.prompt))
    seconds = serving.costs.stage_seconds(Batch(rows, 0.0, tokens, prompt))
    return max(seconds - slopes.attended * tokens * prompt / 2, 0.0)


def table_of(replays: list[Replayed], targets: bool) -> str:
    """A table for a terminal."""
    head = ("layout", "ms to first p50", "p95", "ms/token p50", "p95", "tokens/s/device", "device busy")
    rows = []
    for one in replays:
        summary = one.summary
        times = [
            f"{1e3 * values[rank]:,.1f}" if values else "-"
            for values in (summary.first_token, summary.per_token)
            for rank in (50, 95)
        ]
        shown = f"{summary.in_target:.1%}" if summary.in_target is not None else "-"
        rows.append(
            (
                str(one.candidate.deployment),
                *times,
                f"{one.per_device:,.0f}",
                f"{summary.device_busy:.0%}",
                *([shown] if targets else []),
            )
        )
    return columns((*head, "in target") if targets else head, rows)
