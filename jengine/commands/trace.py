"""`jengine trace`: saves a server engine's recent activity as a file for Perfetto."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from jengine import InvalidArgument
from jengine.commands.connection import add_connection, connect
from jengine.commands.terminal import check_output, note

DESCRIPTION = """\
Save the recent activity of a server's engine: each step by stage, with its programs, padding, predicted and
measured time; and each request from its arrival to its end. Open the file at https://ui.perfetto.dev, or pass
it to `jengine explain`. It contains lengths, times and request ids, but no texts and tokens. A server allows
this for API keys with admin=1 or, without keys, for clients on its machine.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "trace",
        help="save a server engine's recent activity for Perfetto",
        description=DESCRIPTION,
    )
    parser.add_argument("server", metavar="HOST:PORT", help="address of a `jengine serve`")
    parser.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        type=Path,
        default=Path("trace.json"),
        help="the output file (default: trace.json)",
    )
    add_seconds(parser, None)
    add_connection(parser.add_argument_group("connection"))
    parser.set_defaults(run=_trace)


def add_seconds(parser: argparse.ArgumentParser, default: float | None) -> None:
    shown = "all that the server keeps, 8192 steps" if default is None else f"{default:g}"
    parser.add_argument(
        "--seconds",
        metavar="NUMBER",
        type=float,
        default=default,
        help=f"length of the period up to now (default: {shown})",
    )


def check_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0.0 < seconds < 1e9:
        raise InvalidArgument("seconds", seconds, "must be a finite number above 0")


def _trace(options: argparse.Namespace) -> None:
    check_seconds(options.seconds)
    if not re.search(r":\d+$", options.server) and (
        options.server.endswith(".json") or Path(options.server).exists()
    ):
        raise InvalidArgument(
            "server",
            options.server,
            "must be HOST:PORT of a running server; `jengine explain` reads saved traces",
        )
    check_output("output", options.output)
    with connect(options.server, options) as client:
        trace = client.trace(options.seconds)
    trace.save(options.output)
    note(
        f"{options.output}: {trace!r}. Open it at https://ui.perfetto.dev, or: jengine explain"
        f" {options.output}"
    )
