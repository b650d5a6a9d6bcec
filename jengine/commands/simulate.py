"""`jengine simulate`: predicts how an engine serves a trace of requests, with the real scheduler and measured
step costs. `jengine tune` searches options for a trace by simulation, and writes them for --config."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine import EngineConfig, InvalidArgument, SamplingParams, __version__
from jengine.base.display import counted
from jengine.base.progress import progress_bar
from jengine.commands.flags import add_engine, add_flags, add_model, engine_fields
from jengine.commands.terminal import check_output, note, write, write_json

if TYPE_CHECKING:
    from jengine.capacity.simulation.replay import Objective, Tuned
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
    add_flags(
        parser,
        ("--sampler", SAMPLERS, "the sampler that all requests need", "greedy"),
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


def add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
        values = {"goodput": summary.goodput, "refused": outcome.refused}
        write_json({**dataclasses.asdict(summary), **values})
    else:
        write(report(summary, trace, targets, outcome) + "\n")
    return 0


REQUESTS = 2000
STRATEGIES = {  # comments in the options file
    "throughput": "the most tokens a second",
    "latency": "requests meet ttft_ms and tpot_ms",
    "memory": "a request starts once pages for all of its expected tokens are free, so few are preempted",
    "auto": "one of throughput, latency and memory, chosen by load",
}


def add_tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "tune",
        help="search options for a trace of requests, by simulation",
        description=(
            "Search max_num_seqs, max_num_batched_tokens, tile_size, page_size and the strategy for a trace"
            " by simulation, and\nwrite them as a file for --config, with the predicted gain. Costs of"
            " programs that were not measured are\nestimated; options that need them are only named, to be"
            " measured first."
        ),
        epilog=TRACES,
    )
    add_model(parser)
    add_trace(parser)
    parser.set_defaults(requests=REQUESTS)
    text = (
        "what to improve: the share of requests within targets, a request's mean latency, or output"
        " tokens a second (default: goodput if there are targets, otherwise latency)"
    )
    add_flags(
        parser,
        ("--out", "FILE", "the options file to write, in TOML (default: stdout)"),
        ("--objective", ("goodput", "latency", "throughput"), text),
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_engine(parser)
    parser.set_defaults(run=_tune)


def _tune(options: argparse.Namespace) -> int:
    check_output("out", options.out)
    fields = engine_fields(options)
    config = EngineConfig.of(options.model, fields)
    targets, trace = targets_from_flags(options, config), trace_from_flags(options)
    objective: Objective = options.objective or ("goodput" if targets.given(trace) else "latency")
    # the GPU's memory may belong to an engine
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jengine.capacity.simulation.replay import best_options, values
    from jengine.capacity.simulation.setup import Setup

    setup = Setup.of(config, options.costs, options.drafts_right)
    tried = values(config, setup.shape(), targets.given(trace))
    with progress_bar(desc="simulating", unit="set of options", show=not options.quiet) as bar:
        tuned = best_options(
            lambda changes: setup.shape(**changes),
            tried,
            trace,
            targets,
            objective=objective,
            params=params(options),
            tried=bar.update,
        )
    gain = _gain(objective, tuned)
    head = (
        f"# jengine {__version__} tune {options.model} {options.trace}: {gain}, predicted by simulating"
        f" {tuned.tried} sets of options.\n"
    )
    text = head + "".join(map(_line, {**fields, **tuned.changes}.items()))
    if options.out is None:
        write(text)
    else:
        options.out.write_text(text, encoding="utf-8")
        changed = ", ".join(f"{name} {value}" for name, value in tuned.changes.items())
        note(f"{gain}: {changed or 'these options are the best that were found'}")
        note(f"start with --config {options.out}")
    _name_promising(tuned)
    return 0


def _name_promising(tuned: Tuned) -> None:
    """Names options that may be better still."""
    if tuned.promising is not None:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in tuned.promising.items())
        note(
            f"{flags}: may be better, but its programs were not measured here; start an engine with it once,"
            " then tune again"
        )


def _gain(objective: Objective, tuned: Tuned) -> str:
    before, after = tuned.before, tuned.after
    if objective == "throughput":
        return (
            f"{before.output_tokens_per_second:,.0f} to {after.output_tokens_per_second:,.0f} output tokens a"
            " second"
        )
    shares = before.in_target or 0.0, after.in_target or 0.0
    if objective == "goodput" and abs(shares[1] - shares[0]) >= 0.001:
        return f"{shares[0]:.1%} to {shares[1]:.1%} of the requests within targets"
    return f"{before.mean_total:.3g} to {after.mean_total:.3g} s for a request on average"


def _line(option: tuple[str, Any]) -> str:
    name, value = option
    if value is None:  # the default
        return ""
    value = json.dumps(value) if isinstance(value, dict) else value
    why = f"# {value}: {STRATEGIES[value]}\n" if name == "strategy" else ""
    # in TOML, text, numbers, booleans and lists have the same form as in JSON
    plain = isinstance(value, bool | int | float | list | tuple)
    return f"{why}{name} = {json.dumps(value if plain else str(value))}\n"
