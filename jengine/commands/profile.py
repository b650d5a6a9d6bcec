"""`jengine profile`: profiles a running server, and writes one HTML report."""

from __future__ import annotations

import argparse
from pathlib import Path

from jengine import InvalidArgument, Profile, ProfileOptions
from jengine.commands.connection import add_connection, connect
from jengine.commands.terminal import check_output, note, write
from jengine.vllm.flags import add_fields, flag_values


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "profile",
        help="profile a running server",
        description=(
            "Write one HTML report: findings in words, then a time line, flame graphs, waits for locks"
            " and\nfor the"
            " interpreter, garbage collection, system calls, memory, counters and JAX's operations.\n\nA"
            " server allows"
            " this for API keys with admin=1 or, without keys, for clients on its machine."
        ),
    )
    parser.add_argument("server", metavar="HOST:PORT", help="address of a `jengine serve`")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("profile.html"),
        help="the report (default: profile.html)",
    )
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
