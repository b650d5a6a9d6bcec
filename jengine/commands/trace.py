"""`jengine trace`: what a server's engine did of late, as a file for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path

from jengine import InvalidArgument
from jengine.commands.connection import add_connection, connect
from jengine.commands.terminal import note

DESCRIPTION = """\
Save what the engine of a server did of late: each step by stage, its programs, padding, predicted and measured time, and each request
from its arrival to its end. Open the file at https://ui.perfetto.dev, or give it to `jengine explain`. It holds lengths, times and request
ids; no texts and no tokens. The server allows it to API keys with admin=1 and, without keys, to clients on its machine.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "trace",
        help="save what a server's engine did of late, for Perfetto",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("server", metavar="HOST:PORT", help="of a `jengine serve`")
    parser.add_argument("--output", "-o", metavar="FILE", type=Path, default=Path("trace.json"), help="to write (default: trace.json)")
    add_seconds(parser, None)
    add_connection(parser.add_argument_group("connection"))
    parser.set_defaults(run=_trace)


def add_seconds(parser: argparse.ArgumentParser, default: float | None) -> None:
    shown = "all that the server keeps, 8192 steps" if default is None else f"{default:g}"
    parser.add_argument("--seconds", metavar="NUMBER", type=float, default=default, help=f"of the last so many seconds (default: {shown})")


def check_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0.0 < seconds < 1e9:
        raise InvalidArgument("seconds", seconds, "must be a finite number above 0")


def _trace(options: argparse.Namespace) -> None:
    check_seconds(options.seconds)
    with connect(options.server, options) as client:
        trace = client.trace(options.seconds)
    trace.save(options.output)
    note(f"{options.output}: {trace!r}. Open it at https://ui.perfetto.dev, or: jengine explain {options.output}")
