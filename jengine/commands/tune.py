"""`jengine tune`: searches options for a trace by simulation, and writes them for --config."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from jengine import EngineConfig, __version__
from jengine.base.progress import progress_bar
from jengine.commands.flags import add_engine, add_flags, add_model, engine_fields
from jengine.commands.terminal import note, write
from jengine.commands.trace_flags import TRACES, add_trace, params, targets_from_flags, trace_from_flags

if TYPE_CHECKING:
    from jengine.capacity.simulation.replay import Objective, Tuned

REQUESTS = 2000
STRATEGIES = {  # comments in the options file
    "throughput": "the most tokens a second",
    "latency": "requests meet ttft_ms and tpot_ms",
    "memory": "a request starts once pages for all of its expected tokens are free, so few are preempted",
    "auto": "one of throughput, latency and memory, chosen by load",
}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    add_flags(parser, ("--out", "FILE", "the options file to write, in TOML (default: stdout)"))
    parser.add_argument(
        "--objective",
        choices=("goodput", "latency", "throughput"),
        help=(
            "what to improve: the share of requests within targets, a request's mean latency, or output"
            " tokens a second (default: goodput if there are targets, otherwise latency)"
        ),
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_engine(parser)
    parser.set_defaults(run=_tune)


def _tune(options: argparse.Namespace) -> int:
    fields = engine_fields(options)
    config = EngineConfig.of(options.model, fields)
    targets, trace = targets_from_flags(options, config), trace_from_flags(options)
    objective: Objective = options.objective or ("goodput" if targets.given(trace) else "latency")
    # the GPU's memory may belong to an engine
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jengine.capacity.simulation.replay import Search, values
    from jengine.capacity.simulation.setup import Setup

    setup = Setup.of(config, options.costs, options.drafts_right)
    tried = values(config, setup.shape(), targets.given(trace))
    with progress_bar(desc="simulating", unit="set of options", show=not options.quiet) as bar:
        search = Search(
            lambda changes: setup.shape(**changes),
            tried,
            trace,
            targets,
            objective=objective,
            params=params(options),
            tried=bar.update,
        )
        tuned = search.run()
    gain = _gain(objective, tuned)
    head = (
        f"# jengine {__version__} tune {options.model} {options.trace}: {gain}, predicted by simulating"
        f" {tuned.tried} sets of options.\n"
    )
    text = head + "".join(map(_line, {**fields, **tuned.changes}.items()))
    if options.out is None:
        write(text)
        _name_promising(tuned)
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
    why = f"# {value}: {STRATEGIES[value]}\n" if name == "strategy" else ""
    # in TOML, text, numbers and booleans have the same form as in JSON
    return f"{why}{name} = {json.dumps(value if isinstance(value, bool | int | float) else str(value))}\n"
