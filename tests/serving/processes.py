"""Servers as separate processes, as users start them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from jengine.serving.app import FLUSH_SECONDS
from jengine.serving.config import ServerConfig
from jengine.serving.processes.engine_process import EXIT_SECONDS, QUIT_SECONDS
from tests.serving.leaks import alive, wait_until

# What `jengine serve` does, around an engine that is no model's.
CODE = """
import json, sys
from jengine.serving import app
from jengine.serving.config import ServerConfig
from jengine.serving.processes.engine_process import EngineProcess
server, engine, options = json.loads(sys.argv[1])
config = ServerConfig(**server)
models = options if isinstance(options, list) else [["mock", options]]
app.run(config, [
    app.Served(name, lambda on_end, own=own: EngineProcess(engine, own, on_end, config.watchdog_seconds))
    for name, own in models
])
"""
READY = re.compile(
    r"jengine: serving (?P<name>\S+)(?:; OpenAI's API on (?P<http>[^\s;]+))?(?:; gRPC on (?P<grpc>[^\s;]+))?;"
    r" \d+ tokens a sequence, \d+ sequences at once; ready in [\d.]+ s, (?P<compiled>\d+) programs compiled,"
    r" \d+ loaded(?:, \d+ to follow)?(?:; metrics on (?P<metrics>[^\s;]+))?(?:; page on (?P<page>\S+))?\n"
)


class ServerProcess:
    """A server; what it writes is read as it comes.

    Attributes:
        address, http, metrics, page, curl: known from the ready lines.
        log: stderr so far.
    """

    def __init__(self, command: list[str]) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("JENGINE_") or name == "JENGINE_CACHE_DIR"
        }
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.pid, self.log, self.address, self.http, self.metrics = self._process.pid, "", "", "", ""
        self.page = self.curl = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log += line

    def wait_until_ready(self) -> re.Match[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = READY.fullmatch(line)
        assert found, (line, self.log)
        self.address, self.http = found["grpc"] or "", found["http"] or ""
        self.metrics, self.page = found["metrics"], found["page"]
        if self.http.startswith("http://"):
            self.curl = self._process.stdout.readline()
        return found

    def children(self) -> list[int]:
        """Its child processes without those of the sandbox: the engine's."""
        engines = []
        for pid in self.descendants():
            with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                begun = command != Path(f"/proc/{self.pid}/cmdline").read_bytes()  # rather than just forked
                if begun and b"jengine.serving.guards" not in command:
                    engines.append(pid)
        return engines

    def descendants(self) -> list[int]:
        """All its child processes."""
        lists = Path(f"/proc/{self.pid}/task").glob("*/children")
        found = []
        for children in lists:
            with contextlib.suppress(FileNotFoundError):  # its thread has ended meanwhile
                found += map(int, children.read_text().split())
        return found

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = 60.0) -> tuple[int, str]:
        """Its exit code, and its output to stdout after the ready line."""
        code = self._process.wait(seconds)
        self._reader.join()
        assert self._process.stdout is not None
        return code, self._process.stdout.read()

    def close(self) -> None:
        with self._process:  # closes the pipes
            self._process.kill()
            self._reader.join()


@contextmanager
def process(command: list[str]) -> Iterator[ServerProcess]:
    """A process that is killed at the end of this context if it has not exited. Its child processes must have
    ended too.
    """
    server = ServerProcess(command)
    try:
        yield server
    finally:
        children = server.descendants()
        server.close()
        wait_until(lambda: not any(map(alive, children)), lambda: f"left behind: {children}")


@contextmanager
def mock_process(
    folder: Path,
    *,
    engine: str = "tests.mocks.mock_engine:mock_engine",
    server: dict[str, Any] | None = None,
    models: list[tuple[str, dict[str, Any]]] | None = None,
    **options: Any,
) -> Iterator[ServerProcess]:
    """A server process with a mock engine with these options; `server`: options of ServerConfig, by default
    without lame-duck time; `models`: several models' names and options instead."""
    if engine.endswith(":mock_engine"):
        options = {"tokenizer_folder": str(folder), "vocab_size": 501, **options}
    server = {"grpc_port": 0, "port": None, "lame_duck_seconds": 0, **(server or {})}
    arguments = json.dumps([server, engine, models or options])
    with process([sys.executable, "-c", CODE, arguments]) as made:
        yield made


class HealthWatch:
    """The health that a server reports after the call."""

    def __init__(self, channel: grpc.Channel, service: str = "") -> None:
        self.seen: list[str] = []
        self._call = HealthStub(channel).Watch(HealthCheckRequest(service=service))
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for response in self._call:
                self.seen.append(HealthCheckResponse.ServingStatus.Name(response.status))
        except grpc.RpcError as error:
            self.seen.append(error.code().name)

    def wait_for(self, *states: str) -> None:
        wait_until(lambda: self.seen == list(states), lambda: f"{self.seen} is not {states}")

    def close(self) -> list[str]:
        self._call.cancel()
        self._thread.join()
        return self.seen


def wait_for_server(address: str) -> None:
    """Waits until a server is listening there."""
    with grpc.insecure_channel(
        address, [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 50)]
    ) as channel:
        grpc.channel_ready_future(channel).result(timeout=30)


def free_port() -> int:
    """A port that no outgoing connection takes before its server does: below Linux's range for these, where
    a client that tries until the server listens may even be connected to itself.
    """
    while True:
        port = random.randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def longest_stop(config: ServerConfig) -> float:
    """Maximum seconds from SIGTERM to the end of a server's process."""
    lame_duck = config.lame_duck_seconds if config.drain_seconds else 0.0
    return lame_duck + config.drain_seconds + QUIT_SECONDS + 2 * EXIT_SECONDS + FLUSH_SECONDS
