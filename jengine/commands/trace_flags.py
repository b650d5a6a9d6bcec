"""Flags for a trace, its requests, their targets, and step costs, for `simulate` and `tune`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine import EngineConfig, InvalidArgument, SamplingParams
from jengine.commands.flags import add_flags

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


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Adds options for the trace, its requests, their targets, and step costs."""
    parser.add_argument("trace", metavar="TRACE", type=Path, help="a file of requests, see below")
    parser.add_argument(
        "--sampler",
        choices=SAMPLERS,
        default="greedy",
        help="the sampler that all requests need (default: greedy)",
    )
    add_flags(
        parser,
        ("--rate-scale", "NUMBER", "factor on the arrival rate", 1.0),
        ("--requests", "N", "use only the first N requests"),
        ("--costs", "FILE", "step costs: a file from the folder `costs` of any machine's cache"),
        (
            "--drafts-right",
            "NUMBER",
            "share of drafts that are right, as metrics of an engine tell; 0: no drafts",
            0.0,
        ),
        ("--target-ttft-ms", "NUMBER", "milliseconds to the first token, for goodput (default: ttft_ms)"),
        ("--target-tpot-ms", "NUMBER", "mean milliseconds for each further output token (default: tpot_ms)"),
        ("--target-share", "NUMBER", "share of requests that should meet them", 0.95),
    )


def trace_from_flags(options: argparse.Namespace) -> RequestTrace:
    """The trace, with the given changes."""
    import numpy as np

    from jengine.capacity.simulation.trace import read_trace

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
