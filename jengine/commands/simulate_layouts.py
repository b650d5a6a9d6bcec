"""`jengine simulate --devices`: plays a trace on layouts of devices that need not be present."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import Any

from jengine import EngineConfig, InvalidArgument
from jengine.commands.flags import engine_fields
from jengine.commands.layout_flags import cluster_from_flags
from jengine.commands.terminal import note, write
from jengine.commands.trace_flags import params, targets_from_flags, trace_from_flags

OF_LAYOUTS = ("hosts", "link", "network", "layouts")  # flags that need --devices
AUTO = 3  # layouts that are compared


def simulate_layouts(options: argparse.Namespace) -> int:
    """Prints figures of each layout, the best first. The exit code is 1 if none serves the trace."""
    for name in ("costs", "replicas"):
        if getattr(options, name) is not None:
            raise InvalidArgument(name, getattr(options, name), "cannot be combined with --devices")
    count = _number(options.layouts)
    config = EngineConfig.of(options.model, engine_fields(options))
    targets, trace = targets_from_flags(options, config), trace_from_flags(options)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jengine.capacity.layouts.choice import choose
    from jengine.capacity.layouts.replays import ranked, replayed, table_of
    from jengine.capacity.layouts.serving import Traffic
    from jengine.capacity.simulation.report import report, save_plot

    cluster = cluster_from_flags(options)
    traffic = Traffic(
        prompt=round(trace.prompts.mean()),
        output=round(trace.outputs.mean()),
        ttft_ms=targets.ttft_ms,
        tpot_ms=targets.tpot_ms,
    )
    only = config.layout if count is None else None
    choice = choose(config, options.model, cluster, traffic, only=only)
    served = [one for one in choice.candidates if one.best][: count or 1]
    if not served:
        note(choice.verdict)
        return 1
    how: dict[str, Any] = {"params": params(options), "drafts_right": options.drafts_right}
    done = [replayed(config, one, trace, targets, progress=not options.quiet, **how) for one in served]
    best = ranked(done)
    if options.json:
        write(json.dumps([_plain(one) for one in best]) + "\n")
    else:
        write(table_of(best, targets.given(trace)) + "\n\n")
        write(f"{best[0].candidate.deployment}:\n")
        write(report(best[0].summary, trace, targets, best[0].outcome) + "\n")
    if options.plot is not None:
        save_plot(options.plot, best[0].outcome, trace)
    return 0


def _number(layouts: str | None) -> int | None:
    if layouts is None:
        return None
    if layouts != "auto" and not (layouts.isdecimal() and int(layouts) > 0):
        raise InvalidArgument("layouts", layouts, "must be auto or a whole number, at least 1")
    return AUTO if layouts == "auto" else int(layouts)


def _plain(one: Any) -> dict[str, Any]:
    candidate, summary = one.candidate, one.summary
    return {
        "layout": str(candidate.deployment),
        **dataclasses.asdict(candidate.deployment.layout),
        "replicas": candidate.deployment.replicas,
        "planned_per_device": candidate.throughput,
        "per_device": one.per_device,
        **dataclasses.asdict(summary),
        "goodput": summary.goodput,
        "refused": one.outcome.refused,
    }
