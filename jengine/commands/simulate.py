"""`jengine simulate`: predicts how an engine serves a trace of requests, with the real scheduler and measured
step costs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine import EngineConfig, InvalidArgument, SamplingParams
from jengine.base.display import counted
from jengine.commands.flags import add_engine, add_model, engine_fields
from jengine.commands.terminal import note, write

if TYPE_CHECKING:
    from jengine.capacity.simulation.summary import Targets
    from jengine.capacity.simulation.trace import RequestTrace

SAMPLERS: dict[str, dict[str, Any]] = {  # sampling parameters of all requests, by the sampler that they need
    "greedy": {"temperature": 0.0},
    "sample": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_p": 0.95},
    "full": {"temperature": 0.8, "top_p": 0.95, "logprobs": 1},
}
TRACES = """\
A trace is a recording by jengine (--record-trace of other commands), Azure's LLM inference CSV, BurstGPT's
CSV, or Mooncake's JSONL. Requests have the trace's lengths. No model is loaded, compiled or run.
"""


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
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    add_trace(parser)
    parser.add_argument(
        "--replicas",
        metavar="N",
        default="1",
        help="engines that take turns; auto: the fewest that meet the targets (default: 1)",
    )
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="save a plot, such as a PNG (needs the extra bench)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_engine(parser)
    parser.set_defaults(run=_simulate)


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Adds options for the trace, its requests, their targets, and step costs."""
    parser.add_argument("trace", metavar="TRACE", type=Path, help="a file of requests, see below")
    parser.add_argument(
        "--rate-scale",
        metavar="NUMBER",
        type=float,
        default=1.0,
        help="factor on the arrival rate (default: 1)",
    )
    parser.add_argument("--requests", metavar="N", type=int, help="use only the first N requests")
    parser.add_argument(
        "--sampler",
        choices=SAMPLERS,
        default="greedy",
        help="the sampler that all requests need (default: greedy)",
    )
    parser.add_argument(
        "--costs",
        metavar="FILE",
        type=Path,
        help="step costs: a file from the folder `costs` of any machine's cache",
    )
    parser.add_argument(
        "--drafts-right",
        metavar="SHARE",
        type=float,
        default=0.0,
        help="share of drafted tokens that are right, such as the metrics of an engine tell; 0: no drafts"
        " (default: 0)",
    )
    text = "milliseconds to the first token, for goodput (default: ttft_ms)"
    parser.add_argument("--target-ttft-ms", metavar="NUMBER", type=float, help=text)
    parser.add_argument(
        "--target-tpot-ms",
        metavar="NUMBER",
        type=float,
        help="mean milliseconds for each further output token (default: tpot_ms)",
    )
    parser.add_argument(
        "--target-share",
        metavar="NUMBER",
        type=float,
        default=0.95,
        help="share of requests that should meet them (default: 0.95)",
    )


def trace_from_flags(options: argparse.Namespace) -> RequestTrace:
    """The trace, with the given changes."""
    import numpy as np

    from jengine.capacity.simulation.formats import read_trace

    trace = read_trace(options.trace).scaled(options.rate_scale)
    if options.requests is None:
        return trace
    if options.requests < 1:
        raise InvalidArgument("requests", options.requests, "must be at least 1")
    return trace.take(np.arange(min(options.requests, len(trace))))


def targets_from_flags(options: argparse.Namespace, config: EngineConfig) -> Targets:
    """Targets given to the command, or else the engine's."""
    from jengine.capacity.simulation.summary import Targets

    ttft, tpot = options.target_ttft_ms or config.ttft_ms, options.target_tpot_ms or config.tpot_ms
    return Targets(ttft_ms=ttft, tpot_ms=tpot, share=options.target_share)


def params(options: argparse.Namespace) -> SamplingParams:
    """Sampling parameters of all requests, except their lengths."""
    return SamplingParams(ignore_eos=True, **SAMPLERS[options.sampler])


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
    from jengine.capacity.simulation.replay import replay
    from jengine.capacity.simulation.replicas import replicas_needed
    from jengine.capacity.simulation.report import report, save_plot
    from jengine.capacity.simulation.summary import summarize

    how: dict[str, Any] = {"params": params(options), "progress": not options.quiet}
    if options.replicas == "auto":
        found = replicas_needed(shape, trace, targets, **how)
        if found is None:
            note(f"no number of engines meets the targets for {targets.share:.0%} of the requests")
            return 1
        count, outcome = found
        if not options.json:
            write(
                f"{counted(count, 'engine')} needed for {targets.share:.0%} of the requests within their"
                " targets\n\n"
            )
    else:
        outcome = replay(shape, trace, replicas=int(options.replicas), **how)
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
    if options.plot is not None:
        save_plot(options.plot, outcome, trace)
    return 0
