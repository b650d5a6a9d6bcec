"""`jengine explain`: bottlenecks of a running server's engine, or of a saved trace."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from jengine import Trace, explain
from jengine.commands.connection import add_connection, connect
from jengine.commands.terminal import write
from jengine.commands.trace import add_seconds, check_seconds

SECONDS = 60.0


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="find an engine's bottlenecks and the options to change",
        description=(
            "Find the bottlenecks of a server's engine, or of a saved trace: the evidence, the option to"
            " change,\nand the predicted effect. Needs the same permission as `jengine trace`."
        ),
    )
    parser.add_argument(
        "source",
        metavar="HOST:PORT|FILE",
        help="a server, or a file written by `jengine trace` or Trace.save",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_seconds(parser, SECONDS)
    add_connection(parser.add_argument_group("connection to a server"))
    parser.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> None:
    check_seconds(options.seconds)
    explanation = explain(_of(options))
    write(json.dumps(dataclasses.asdict(explanation)) + "\n" if options.json else f"{explanation}\n")


def _of(options: argparse.Namespace) -> Trace:
    """The trace of a file, limited to its last seconds, or of a server."""
    if Path(options.source).is_file():
        return Trace.load(options.source).last(options.seconds)
    with connect(options.source, options) as client:
        return client.trace(options.seconds)
