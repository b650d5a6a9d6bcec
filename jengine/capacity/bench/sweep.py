"""Benchmarks a server with each set of options: starts, measures and stops it."""

from __future__ import annotations

import itertools
import json
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jengine.base.errors import InvalidArgument, JengineError

START_SECONDS, STOP_SECONDS = 1800.0, 60.0
Options = dict[str, Any]


def read_params(name: str, path: Path | None) -> list[Options]:
    """Sets of options: a JSON list of objects, or an object that maps names to objects; None: one empty set.

    Raises:
        InvalidArgument: the file cannot be read, or does not have this form.
    """
    if path is None:
        return [{}]
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument(name, str(path), f"cannot be read: {error}") from None
    sets = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(sets, list) or not sets or not all(isinstance(one, dict) for one in sets):
        raise InvalidArgument(name, str(path), "must be a JSON list of objects, each a set of options")
    return sets


def command_with(command: str, options: Options) -> list[str]:
    """Appends options to a command: {"max_num_seqs": 8, "overlap": False} as --max-num-seqs 8
    --no-overlap.
    """
    words = shlex.split(command)
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return words


def sweep(
    serve: str, bench: str, servers: list[Options], clients: list[Options], *, runs: int, ready_url: str
) -> Iterator[Options]:
    """Yields a line for each run, with its options and the output of `bench`.

    Args:
        serve, bench: commands; `bench` prints one JSON object on its last line.
        servers, clients: sets of options for each.
        ready_url: a URL that returns 200 once the server is ready.

    Raises:
        JengineError: a command has failed.
    """
    for server in servers:
        with served(command_with(serve, server), ready_url):
            for client, run in itertools.product(clients, range(runs)):
                yield {"serve": server, "bench": client, "run": run, **_measured(command_with(bench, client))}


def _measured(command: list[str]) -> Options:
    """The last line printed by a benchmark."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, check=True
        )
        measured: Options = json.loads(done.stdout.strip().rpartition("\n")[2])
        return measured
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise JengineError(f"`{shlex.join(command)}` has failed: {error}") from None


@contextmanager
def served(command: list[str], ready_url: str) -> Iterator[None]:
    """Runs a server in this context."""
    try:
        process = subprocess.Popen(command, stdout=2, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise JengineError(f"`{shlex.join(command)}` cannot be started: {error.strerror}") from None
    try:
        until = time.monotonic() + START_SECONDS
        while not _is_ready(ready_url):
            if process.poll() is not None:
                raise JengineError(f"`{shlex.join(command)}` has ended with {process.returncode}")
            if time.monotonic() > until:
                raise JengineError(f"{ready_url} did not answer within {START_SECONDS:.0f} s")
            time.sleep(0.2)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
