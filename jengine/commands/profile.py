"""`jengine profile`: profiles a running server or a command, and writes one HTML report."""

from __future__ import annotations

import argparse
import re
import signal
from pathlib import Path

from jengine import InvalidArgument, Profile, ProfileOptions
from jengine.commands.connection import CONNECTION, add_connection, connect
from jengine.commands.terminal import note, write
from jengine.insight.profiling.data import SYSTEM_CALLS

ADDRESS = re.compile(r"[^/\s]+:\d+")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "profile",
        help="profile a running server or a command",
        description=(
            "Write one HTML report: findings in words, then a time line, flame graphs, waits for locks"
            " and\nfor the interpreter, garbage collection, system calls, memory, counters and JAX's"
            " operations.\n\n  jengine profile 127.0.0.1:50051 --seconds 10\n  jengine profile -- jengine"
            ' generate demo "def main("\n  jengine profile -- python my_program.py\n\nA server allows this'
            " for API keys with admin=1 or, without keys, for clients on its machine. For a command, all"
            " Python processes\nthat use jengine are profiled from start to end. Uses py-spy, perf and strace"
            " if they are installed."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", metavar="HOST:PORT|-- COMMAND", nargs="+", help="a server, or a command after `--`"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("profile.html"),
        help="the report (default: profile.html)",
    )
    parser.add_argument("--seconds", metavar="NUMBER", type=float, help="duration for a server (default: 10)")
    boolean = argparse.BooleanOptionalAction
    parser.add_argument(
        "--heap",
        action=boolean,
        help="measure the heap's growth; slows a command (default: on for a server, else off)",
    )
    parser.add_argument(
        "--jax", action=boolean, default=True, help="capture with jax.profiler for up to 2 s (default: on)"
    )
    parser.add_argument(
        "--system-calls",
        choices=SYSTEM_CALLS,
        default="auto",
        help="tool for counting system calls (default: auto)",
    )
    parser.add_argument(
        "--rate", metavar="N", type=int, default=100, help="samples of stacks a second (default: 100)"
    )
    add_connection(parser.add_argument_group("connection to a server"))
    parser.set_defaults(run=_profile)


def _profile(options: argparse.Namespace) -> int:
    target: list[str] = options.target
    server = len(target) == 1 and ADDRESS.fullmatch(target[0]) is not None
    for name in () if server else ("seconds", *CONNECTION):
        if value := getattr(options, name):
            raise InvalidArgument(
                name, str(value), "is only for a server; a command is profiled from its start to its end"
            )
    wanted = ProfileOptions(
        seconds=10.0 if options.seconds is None else options.seconds,
        heap=server if options.heap is None else options.heap,
        jax=options.jax,
        system_calls=options.system_calls,
        rate=options.rate,
    )
    _check_output(options.output)
    code = 0
    if server:
        with connect(target[0], options) as client:
            profile, jax = client.profile(wanted)
        profile.target = f"{profile.target} at {target[0]}"
    else:
        from jengine.insight.profiling.command import profile_command

        # the signal is for the command, which may end normally
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            profile, jax, code = profile_command(target, wanted)
        finally:
            signal.signal(signal.SIGINT, before)
    _save(profile, jax, options.output)
    return code


def _check_output(output: Path) -> None:
    """Checks this before the profile is taken."""
    if not output.parent.is_dir():
        raise InvalidArgument("output", str(output), "cannot be written: its folder does not exist")


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
