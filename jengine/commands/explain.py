"""What a server's engine did lately: `jengine explain`, `jengine trace` and `jengine profile`."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

from jengine import InvalidArgument, Profile, ProfileOptions, Trace, explain
from jengine.commands.connection import add_connection, connect
from jengine.commands.flags import add_flags
from jengine.commands.terminal import check_output, note, write, write_json
from jengine.vllm.flags import add_fields, flag_values

PERIOD = "length of the period up to now"
DESCRIPTION = """\
Save the recent activity of a server's engine: each step by stage, with its programs, padding, predicted and
measured time; and each request from its arrival to its end. Open the file at https://ui.perfetto.dev, or pass
it to `jengine explain`. It contains lengths, times and request ids, but no texts and tokens. A server allows
this for API keys with admin=1 or, without keys, for clients on its machine.
"""


def add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "trace", help="save a server engine's recent activity for Perfetto", description=DESCRIPTION
    )
    _add_server(parser, "trace.json", "the output file")
    add_flags(parser, ("--seconds", "NUMBER", f"{PERIOD} (default: all that the server keeps, 8192 steps)"))
    add_connection(parser.add_argument_group("connection"))
    parser.set_defaults(run=_trace)


def _add_server(parser: argparse.ArgumentParser, output: str, text: str) -> None:
    parser.add_argument("server", metavar="HOST:PORT", help="address of a `jengine serve`")
    text = f"{text} (default: {output})"
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, default=Path(output), help=text)


def _check_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0.0 < seconds < 1e9:
        raise InvalidArgument("seconds", seconds, "must be a finite number above 0")


def _trace(options: argparse.Namespace) -> None:
    _check_seconds(options.seconds)
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


def add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    add_flags(parser, ("--seconds", "NUMBER", PERIOD, 60.0))
    add_connection(parser.add_argument_group("connection to a server"))
    parser.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> None:
    _check_seconds(options.seconds)
    explanation = explain(_of(options))
    if options.json:
        write_json(dataclasses.asdict(explanation))
    else:
        write(f"{explanation}\n")


def _of(options: argparse.Namespace) -> Trace:
    """The trace of a file, limited to its last seconds, or of a server."""
    if Path(options.source).is_file():
        return Trace.load(options.source).last(options.seconds)
    with connect(options.source, options) as client:
        return client.trace(options.seconds)


def add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "profile",
        help="profile a running server",
        description=(
            "Write one HTML report: findings in words, then a time line, flame graphs, waits for locks\n"
            "and for the interpreter, garbage collection, system calls, memory, counters and JAX's\n"
            "operations.\n\n"
            "A server allows this for API keys with admin=1 or, without keys, for clients on its machine."
        ),
    )
    _add_server(parser, "profile.html", "the report")
    add_fields(parser.add_argument_group("measurements"), ProfileOptions)
    add_connection(parser.add_argument_group("connection"))
    parser.set_defaults(run=_profile)


def _profile(options: argparse.Namespace) -> None:
    wanted = ProfileOptions(**flag_values(options, ProfileOptions))
    check_output("output", options.output)
    with connect(options.server, options) as client:
        profile, jax = client.profile(wanted)
    profile.target = f"{profile.target} at {options.server}"
    _save(profile, jax, options.output)


def _save(profile: Profile, jax: bytes, output: Path) -> None:
    from jengine.insight.profiling.report import report_html, summary

    capture = output.with_suffix(".jax.zip")
    try:
        if jax:
            capture.write_bytes(jax)
        output.write_text(report_html(profile, capture.name if jax else ""))
    except OSError as error:
        raise InvalidArgument("output", str(output), f"cannot be written: {error.strerror}") from None
    write(summary(profile) + "\n")
    note(f"{output}: the report" + (f"; {capture}: jax.profiler's capture" if jax else ""))
