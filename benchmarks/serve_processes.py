"""Server and client processes for serve_load.py."""

from __future__ import annotations

import json
import os
import pstats
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

# Like `jengine serve`, with any engine. The fourth argument enables cProfile.
SERVER = """
import cProfile, json, pathlib, sys, threading
named = threading.Thread._set_native_id
def name(self):  # so that the kernel knows threads by their names, too; Python 3.14 does it by itself
    named(self)
    pathlib.Path(f"/proc/self/task/{self.native_id}/comm").write_text(self.name[:15])
threading.Thread._set_native_id = name
from jengine.serving import app
from jengine.serving.config import ServerConfig
from jengine.serving.processes.engine_process import EngineProcess
server, engine, options, profile = json.loads(sys.argv[1])
make = lambda on_end: EngineProcess(engine, options, on_end)
run = lambda: app.run(ServerConfig(**server), [app.Served("model", make)])
if profile:
    watch = cProfile.Profile()
    watch.runcall(run)
    watch.dump_stats(profile)
else:
    run()
"""
# limits that reject nothing in measurements
WIDE = {
    "port": None,
    "grpc_port": 0,
    "max_waiting": 2000,
    "max_streams_per_client": 4000,
    "log_level": "error",
}
MOCK_SEQS = 1024
# Functions that wait for events, also in the threads that communicate with the engine's process.
WAITING = ("epoll", "'recv' of", "SimpleQueue", "'acquire' of")


class Process:
    """A process that writes lines, and may read them."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid

    def line(self, said: str | None = None) -> str:
        """Sends a line, if given, and returns the next line that it writes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if said is not None:
            self._process.stdin.write(said + "\n")
        line = self._process.stdout.readline()
        assert line, f"process {self.pid} has ended"
        return line

    def cpu_seconds(self, children: bool = False) -> float:
        """CPU seconds that it has used, optionally with its running children."""
        lists = Path(f"/proc/{self.pid}/task").glob("*/children") if children else ()
        pids = [str(self.pid), *(pid for file in lists for pid in file.read_text().split())]
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        return float(sum(int(of[11]) + int(of[12]) for of in fields) / os.sysconf("SC_CLK_TCK"))

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate()


@contextmanager
def server(
    engine: str,
    options: dict[str, Any],
    *,
    metrics: bool = False,
    profile: str = "",
    more: dict[str, Any] | None = None,
) -> Iterator[tuple[Process, str]]:
    """A ready server over an engine process (see jengine/serving/processes/engines.py), and its address.

    `more`: options of ServerConfig. With {"port": 0}, the address is followed by a space and the HTTP
    URL.
    """
    config = {**WIDE, **({"metrics_port": 0} if metrics else {}), **(more or {})}
    process = Process("-c", SERVER, json.dumps([config, engine, options, profile]))
    try:
        line = process.line()
        found, http = re.search(r"gRPC on (\S+?);", line), re.search(r"API on (\S+?)[;\s]", line)
        assert found is not None
        yield process, found[1] + (f" {http[1]}" if http else "")
    finally:
        process.end()


def model_server(config: dict[str, Any], **options: Any) -> AbstractContextManager[tuple[Process, str]]:
    return server("jengine.serving.processes.engines:model_engine", config, **options)


def mock_server(step_seconds: float, **options: Any) -> AbstractContextManager[tuple[Process, str]]:
    """A server with a mock engine, whose texts are the demo model's."""
    engine = {
        "tokenizer_folder": str(ROOT / "jengine" / "demo"),
        "max_num_seqs": MOCK_SEQS,
        "pages": 10**6,
        "seconds": step_seconds,
    }
    return server("tests.mocks.mock_engine:mock_engine", engine, **options)


@contextmanager
def worker(kind: str, where: str) -> Iterator[Process]:
    """A process of load_worker.py."""
    process = Process("-m", "benchmarks.load_worker", kind, where)
    try:
        yield process
    finally:
        process.end()


def load(worker: Process, requests: list[Any], concurrency: int | None = None) -> dict[str, Any]:
    """The worker's results for these requests."""
    told: dict[str, Any] = json.loads(
        worker.line(json.dumps({"requests": requests, "concurrency": concurrency}))
    )
    return told


@contextmanager
def profile_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "profile"


def top_functions(profile: Path, count: int = 15) -> list[dict[str, Any]]:
    """The functions with the most time, without their callees; shares of all time except waiting."""
    functions = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    spent = {
        where: (calls, own)
        for where, (_, calls, own, _, _) in functions.items()
        if not any(w in where[2] for w in WAITING)
    }
    whole = sum(own for _, own in spent.values())
    most = sorted(spent.items(), key=lambda item: -item[1][1])[:count]
    return [
        {
            "function": f"{_short(file)}:{name}" if line else name,
            "calls": calls,
            "share": round(own / whole, 3),
        }
        for (file, line, name), (calls, own) in most
    ]


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])
