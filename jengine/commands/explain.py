"""`jengine explain`: what bounds an engine, of a running server or by a saved trace."""

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
        help="what bounds an engine, and what to change",
        description="Say what bounds the engine of a server, or one whose trace was saved: with the evidence, the option to change,\n"
        "and the effect that costs predict. The server allows it as `jengine trace`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="HOST:PORT|FILE", help="a server, or a file that `jengine trace` or Trace.save has written")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_seconds(parser, SECONDS)
    add_connection(parser.add_argument_group("connection to a server"))
    parser.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> None:
    check_seconds(options.seconds)
    explanation = explain(_of(options))
    write(json.dumps(dataclasses.asdict(explanation)) + "\n" if options.json else f"{explanation}\n")


def _of(options: argparse.Namespace) -> Trace:
    """A file's, the last seconds of it; else a server's."""
    if Path(options.source).is_file():
        return Trace.load(options.source).last(options.seconds)
    with connect(options.source, options) as client:
        return client.trace(options.seconds)
