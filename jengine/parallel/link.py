"""Processes that share an engine: process 0 schedules, and tells the others each call that it makes, before it makes it.

Sockets carry it, not devices: a device's exchange would wait for a process that has died, a socket ends with it. The others
find process 0 through JAX's coordinator, and prove with a token from there that they belong.
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
from typing import Any, Protocol

import jax
import msgspec
import numpy as np

from jengine.errors import EngineDead, InvalidArgument

TOKEN = 32  # bytes
PATIENCE = 300.0  # seconds until all processes must have come
POLL = 0.0001  # seconds between looks at a step that is running
SETTLE = 1.0  # seconds in which a process that died is known to have, after an exchange with it failed
END = b""  # the last frame of process 0


class Link(Protocol):
    """A process's connection to the others of its engine."""

    def agree(self, value: Any, choose: Callable[[list[Any]], Any]) -> Any:
        """Process 0's choice from the values of all processes, in their order. Values are plain: numbers, text, lists."""

    def tell(self, frame: bytes) -> None:
        """Process 0: to all others."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """Process 0: until something is ready that all processes work on.

        Raises:
            EngineDead: a process has ended, so it never will be.
        """

    def settle(self) -> None:
        """Process 0: after an exchange failed, whether it was that a process ended. Raises EngineDead then."""

    def report(self, count: int) -> None:
        """How many of the table's programs this process has, the first ones."""

    def reported(self) -> int | None:
        """Process 0: how many of them all others have; None where there are no others."""


class SingleProcess:
    """The only process."""

    def agree(self, value: Any, choose: Callable[[list[Any]], Any]) -> Any:
        return choose([value])

    def tell(self, frame: bytes) -> None:
        pass

    def wait(self, ready: Callable[[], bool]) -> None:
        pass

    def settle(self) -> None:
        pass

    def report(self, count: int) -> None:
        pass

    def reported(self) -> int | None:
        return None


class Leader:
    """Process 0's."""

    def __init__(self, host: str, processes: int) -> None:
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
        self.tell(msgspec.msgpack.encode(chosen))
        return chosen

    def watch(self) -> None:
        """From now on the others only report; where one of them ends, it is known at once."""
        for process, other in self._others.items():
            threading.Thread(target=self._watch, args=(process, other), name=f"process {process}", daemon=True).start()

    def _watch(self, process: int, other: socket.socket) -> None:
        other.settimeout(None)
        while (frame := _receive(other)) is not None:
            self._reported[process] = int.from_bytes(frame, "big")
        self._lost = process

    def report(self, count: int) -> None:
        pass

    def reported(self) -> int:
        return min(self._reported.get(process, 0) for process in self._others)

    def tell(self, frame: bytes) -> None:
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
        """At this process's end: let the others end."""
        if self._lost is not None:
            _leave()
        self.tell(END)
        for other in self._others.values():
            other.close()


class Follower:
    """Any other process's."""

    def __init__(self, host: str, process: int) -> None:
        word = _broadcast(np.zeros(TOKEN + 2, np.uint8)).tobytes()
        self._leader = socket.create_connection((host, int.from_bytes(word[TOKEN:], "big")), timeout=PATIENCE)
        _ready(self._leader)
        self._send(word[:TOKEN] + process.to_bytes(4, "big"))
        self._leader.settimeout(None)
        self._lost = False

    def _send(self, frame: bytes) -> None:
        self._leader.sendall(len(frame).to_bytes(4, "big") + frame)

    def agree(self, value: Any, choose: Callable[[list[Any]], Any]) -> Any:
        with contextlib.suppress(OSError):  # hearing tells
            self._send(msgspec.msgpack.encode(value))
        return msgspec.msgpack.decode(self.heard())

    def heard(self) -> bytes:
        """The next frame; END if it is the last.

        Raises:
            EngineDead: process 0 ended without a word.
        """
        frame = _receive(self._leader)
        if frame is None:
            self._lost = True
            raise EngineDead("process 0 of this engine has ended")
        return frame

    def close(self) -> None:
        """At this process's end."""
        if self._lost:
            _leave()

    def report(self, count: int) -> None:
        with contextlib.suppress(OSError):  # hearing tells
            self._send(count.to_bytes(4, "big"))

    def tell(self, frame: bytes) -> None:
        raise AssertionError("process 0 alone tells")

    def reported(self) -> None:
        raise AssertionError("process 0 alone needs to know")

    def wait(self, ready: Callable[[], bool]) -> None:
        raise AssertionError("process 0 alone waits")

    def settle(self) -> None:
        raise AssertionError("process 0 alone waits")


def join(coordinator: str, processes: int, process: int) -> None:
    """Make this one of the processes whose devices JAX sees together; before JAX has started.

    Raises:
        InvalidArgument: the coordinator cannot be reached or listened on.
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


def host_of(coordinator: str) -> str:
    return coordinator.rpartition(":")[0].strip("[]")


def _leave() -> None:
    """JAX's orderly end would wait for the process that is gone, and then abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _broadcast(word: np.ndarray) -> np.ndarray:
    """Process 0's word."""
    from jax.experimental import multihost_utils  # slow to import

    heard: np.ndarray = np.asarray(multihost_utils.broadcast_one_to_all(word))
    return heard.astype(np.uint8)


def _ready(connection: socket.socket) -> None:
    """Frames leave at once, and a machine that vanished is noticed in a few seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), 2 if option == "TCP_KEEPCNT" else 1)


def _receive(connection: socket.socket) -> bytes | None:
    """A frame, or None where the other side has ended."""
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
