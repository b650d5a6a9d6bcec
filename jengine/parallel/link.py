"""The link between processes that share an engine: process 0 schedules, and sends each of its calls to the
others first.

It uses sockets rather than devices: an exchange between devices would wait for a process that has died, while
a socket is closed. The other processes find process 0 through JAX's coordinator, and authenticate with a
token from there.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import msgspec
import numpy as np

from jengine.base.errors import EngineDead, InvalidArgument

TOKEN = 32  # bytes
PATIENCE = 300.0  # maximum seconds until all processes have connected
POLL = 0.0001  # seconds between checks of a running step
SETTLE = 1.0  # after a failed exchange, seconds until the end of the process that caused it is known
REPORT, NUMBER = 4, 8  # bytes of a report, and of a result's number, which precedes it
END = b""  # the last frame of process 0


class Link:
    """A process's connection to the others of its engine; here there are none."""

    def __init__(self) -> None:
        self.results: dict[int, bytes] = {}

    def agree(self, value: Any, choose: Callable[[list[Any]], Any]) -> Any:
        """Process 0's choice from the values of all processes, in their order. Values must be numbers, text
        or lists.
        """
        return choose([value])

    def broadcast(self, frame: bytes) -> None:
        """Process 0: sends a frame to all others."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """Process 0: waits until a result of all processes is ready.

        Raises:
            EngineDead: a process has ended.
        """

    def settle(self) -> None:
        """Process 0: after a failed exchange, raises EngineDead if a process has ended."""

    def report(self, count: int) -> None:
        """Reports how many of the table's programs, counted from the first, this process has."""

    def reported(self) -> int | None:
        """Process 0: how many of them all other processes have; None if there are no others."""
        return None


class SingleProcess(Link):
    """The only process."""


class Leader(Link):
    """The link in process 0.

    Attributes:
        results: results that others have sent, by number. The caller removes those that it uses.
    """

    def __init__(self, host: str, processes: int) -> None:
        super().__init__()
        self._lost: int | None = None  # the process that has ended
        self._reported: dict[int, int] = {}  # by process
        token = secrets.token_bytes(TOKEN)
        with socket.create_server((host, 0)) as server:
            server.settimeout(PATIENCE)
            _broadcast(np.frombuffer(token + server.getsockname()[1].to_bytes(2, "big"), np.uint8))
            self._others: dict[int, socket.socket] = {}
            while len(self._others) < processes - 1:
                other, _ = server.accept()
                other.settimeout(PATIENCE)
                hello = _receive(other)
                if hello is not None and hmac.compare_digest(hello[:TOKEN], token):
                    _ready(other)
                    self._others[int.from_bytes(hello[TOKEN:], "big")] = other
                else:
                    other.close()

    def agree(self, value: Any, choose: Callable[[list[Any]], Any]) -> Any:
        values = [value]
        for process, other in sorted(self._others.items()):
            frame = _receive(other)
            if frame is None:
                self._lost = process
                raise EngineDead(f"process {process} of this engine ended during its start")
            values.append(msgspec.msgpack.decode(frame))
        chosen = choose(values)
        self.broadcast(msgspec.msgpack.encode(chosen))
        return chosen

    def watch(self) -> None:
        """From now on the other processes only send reports, and the end of one is noticed immediately."""
        for process, other in self._others.items():
            threading.Thread(
                target=self._watch, args=(process, other), name=f"process {process}", daemon=True
            ).start()

    def _watch(self, process: int, other: socket.socket) -> None:
        other.settimeout(None)
        while (frame := _receive(other)) is not None:
            if len(frame) == REPORT:
                self._reported[process] = int.from_bytes(frame, "big")
            else:
                self.results[int.from_bytes(frame[:NUMBER], "big")] = frame[NUMBER:]
        self._lost = process

    def reported(self) -> int:
        return min(self._reported.get(process, 0) for process in self._others)

    def broadcast(self, frame: bytes) -> None:
        for process, other in self._others.items():
            try:
                other.sendall(len(frame).to_bytes(4, "big") + frame)
            except OSError:
                self._lost = process
        self._check()

    def wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._check()
            time.sleep(POLL)

    def settle(self) -> None:
        until = time.monotonic() + SETTLE
        while time.monotonic() < until:
            self._check()
            time.sleep(POLL)

    def _check(self) -> None:
        if self._lost is not None:
            raise EngineDead(f"process {self._lost} of this engine has ended")

    def close(self) -> None:
        """When this process ends: lets the others end."""
        if self._lost is not None:
            _leave()
        self.broadcast(END)
        for other in self._others.values():
            other.close()


class Follower(Link):
    """The link in any other process."""

    def __init__(self, host: str, process: int) -> None:
        super().__init__()
        self._sending = threading.Lock()  # threads send reports and results
        word = _broadcast(np.zeros(TOKEN + 2, np.uint8)).tobytes()
        self._leader = socket.create_connection((host, int.from_bytes(word[TOKEN:], "big")), timeout=PATIENCE)
        _ready(self._leader)
        self._send(word[:TOKEN] + process.to_bytes(4, "big"))
        self._leader.settimeout(None)
        self._lost = False

    def _send(self, frame: bytes) -> None:
        with self._sending:
            self._leader.sendall(len(frame).to_bytes(4, "big") + frame)

    def agree(self, value: Any, choose: Callable[[list[Any]], Any]) -> Any:
        with contextlib.suppress(OSError):  # `heard` reports the failure
            self._send(msgspec.msgpack.encode(value))
        return msgspec.msgpack.decode(self.heard())

    def heard(self) -> bytes:
        """Waits for the next frame; END if it is the last.

        Raises:
            EngineDead: process 0 ended unexpectedly.
        """
        frame = _receive(self._leader)
        if frame is None:
            self._lost = True
            raise EngineDead("process 0 of this engine has ended")
        return frame

    def close(self) -> None:
        """Closes the connection at the end of this process."""
        if self._lost:
            _leave()

    def report(self, count: int) -> None:
        with contextlib.suppress(OSError):  # `heard` reports the failure
            self._send(count.to_bytes(REPORT, "big"))

    def send_result(self, number: int, frame: bytes) -> None:
        """Sends a result to process 0, which is longer than a report."""
        with contextlib.suppress(OSError):  # `heard` reports the failure
            self._send(number.to_bytes(NUMBER, "big") + frame)


def join(coordinator: str, processes: int, process: int) -> None:
    """Adds this process to those whose devices JAX uses together. Must be called before JAX starts.

    Raises:
        InvalidArgument: the coordinator's address cannot be reached, or cannot be used to listen.
    """
    if jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=int(PATIENCE),
            shutdown_timeout_seconds=10,
            coordinator_bind_address=coordinator,
            cluster_detection_method="deactivate",
        )
    except (RuntimeError, ValueError) as error:
        raise InvalidArgument("coordinator", coordinator, str(error).splitlines()[0]) from error


def _leave() -> None:
    """Exits without JAX's shutdown, which would wait for the process that has ended, and then abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _broadcast(word: np.ndarray) -> np.ndarray:
    """Sends process 0's value to all processes."""
    from jax.experimental import multihost_utils  # slow to import

    heard: np.ndarray = np.asarray(multihost_utils.broadcast_one_to_all(word))
    return heard.astype(np.uint8)


def _ready(connection: socket.socket) -> None:
    """Configures a socket to send frames immediately, and to detect within seconds that a machine has
    disappeared.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"):
        if hasattr(socket, option):
            connection.setsockopt(
                socket.IPPROTO_TCP, getattr(socket, option), 2 if option == "TCP_KEEPCNT" else 1
            )


def _receive(connection: socket.socket) -> bytes | None:
    """Receives a frame, or None if the other side has closed the connection."""
    head = _exactly(connection, 4)
    return None if head is None else _exactly(connection, int.from_bytes(head, "big"))


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except OSError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)
