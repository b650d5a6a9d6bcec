"""`jengine simulate`: predicts how an engine serves a trace of requests, with the real scheduler and measured
step costs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import Any

from jengine import EngineConfig, InvalidArgument
from jengine.base.display import counted
from jengine.commands.flags import add_engine, add_model, engine_fields
from jengine.commands.terminal import note, write
from jengine.commands.trace_flags import TRACES, add_trace, params, targets_from_flags, trace_from_flags


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "simulate",
        help="latencies, goodput and engines needed for a trace of requests, without running it",
        description=(
            "Run the scheduler over a trace on a virtual clock, with the costs of steps that engines with"
            " these options have\nmeasured on this machine, and print latencies, goodput, utilisation, and"
            " how many engines the targets need."
        ),
        epilog=TRACES,
    )
    add_model(parser)
    add_trace(parser)
    parser.add_argument(
        "--replicas",
        metavar="N",
        default="1",
        help="engines that take turns; auto: the fewest that meet the targets (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_engine(parser)
    parser.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    if options.replicas != "auto" and not (options.replicas.isdecimal() and int(options.replicas) > 0):
        raise InvalidArgument("replicas", options.replicas, "must be auto or a whole number, at least 1")
    config = EngineConfig.of(options.model, engine_fields(options))
    targets, trace = targets_from_flags(options, config), trace_from_flags(options)
    if options.replicas == "auto" and not targets.given(trace):
        raise InvalidArgument(
            "replicas", "auto", "needs targets: --target-ttft-ms, --target-tpot-ms, or the trace's"
        )
    # the GPU's memory may belong to an engine
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jengine.capacity.simulation.setup import Setup

    shape = Setup.of(config, options.costs, options.drafts_right).shape()
    from jengine.capacity.simulation.replay import replay, replicas_needed
    from jengine.capacity.simulation.summary import report, summarize

    arguments: dict[str, Any] = {"params": params(options), "progress": not options.quiet}
    if options.replicas == "auto":
        result = replicas_needed(shape, trace, targets, **arguments)
        if result is None:
            note(f"no number of engines meets the targets for {targets.share:.0%} of the requests")
            return 1
        count, outcome = result
        if not options.json:
            write(
                f"{counted(count, 'engine')} needed for {targets.share:.0%} of the requests within their"
                " targets\n\n"
            )
    else:
        outcome = replay(shape, trace, replicas=int(options.replicas), **arguments)
    summary = summarize(outcome, trace, targets)
    if options.json:
        write(
            json.dumps(
                {**dataclasses.asdict(summary), "goodput": summary.goodput, "refused": outcome.refused}
            )
            + "\n"
        )
    else:
        write(report(summary, trace, targets, outcome) + "\n")
    return 0
