"""Pages that another process serves."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from jengine.stores.frames import (
    Answer,
    Drop,
    Find,
    Found,
    Frames,
    Keep,
    Kept,
    Load,
    Loaded,
    StoreMessage,
    greet,
)
from jengine.stores.memory import MAX_PAGE, Part, StoreError, size_of

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds without an attempt after a failure; doubles each time
MOST_IDLE = 4  # connections that are kept


class RemoteStore:
    """The pages of a PageServer. Calls of several threads use several connections.

    After a failure, calls fail at once for a while, so a server that is down delays no request.

    Args:
        timeout: seconds that a connection attempt, or waiting for the next bytes, may take.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        timeout: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host, self.port, self._token, self._timeout, self._clock = host, port, token, timeout, clock
        self._lock = threading.Lock()
        self._idle: list[Frames[Answer]] = []
        self._again, self._pause = 0.0, 0.0  # when the next attempt may be made; the last pause
        self._closed = False

    def find(self, names: Sequence[bytes], wait: float = 0.0) -> list[bool]:
        with self._connection(wait) as frames:
            frames.send(Find([*names], wait))
            there = _expect(frames, Found).there
            if len(there) != len(names):
                raise StoreError(f"{len(there)} answers for {len(names)} pages")
            return there

    def load(self, names: Sequence[bytes]) -> Iterator[bytes | None]:
        with self._connection() as frames:
            frames.send(Load([*names]))
            for _ in names:
                yield _expect(frames, Loaded).page

    def keep(self, name: bytes, page: Sequence[Part]) -> bool:
        if size_of(page) > MAX_PAGE:
            return False
        with self._connection() as frames:
            frames.send(Keep(name, b"".join(page)))
            return _expect(frames, Kept).kept

    def drop(self, name: bytes) -> None:
        with self._connection() as frames:
            frames.send(Drop(name))
            _expect(frames, Kept)

    def close(self) -> None:
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for frames in idle:
            frames.connection.close()

    @contextlib.contextmanager
    def _connection(self, wait: float = 0.0) -> Iterator[Frames[Answer]]:
        """A connection for one question. It is kept only if its answers were read to the end."""
        frames = self._take()
        try:
            frames.connection.settimeout(self._timeout + wait)
            yield frames
        except GeneratorExit:
            frames.connection.close()
            raise
        except (StoreError, OSError):
            frames.connection.close()
            self._failed()
            raise
        except BaseException:
            frames.connection.close()
            raise
        with self._lock:
            self._pause = 0.0
            if not self._closed and len(self._idle) < MOST_IDLE:
                self._idle.append(frames)
                return
        frames.connection.close()

    def _take(self) -> Frames[Answer]:
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")
            while self._idle:
                frames = self._idle.pop()
                if not _ended(frames.connection):
                    return frames
                frames.connection.close()
            if self._clock() < self._again:
                raise StoreError(f"{self.host}:{self.port} did not answer a moment ago")
        try:
            connection = socket.create_connection((self.host, self.port), self._timeout)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                greet(connection, self._token, server=False, seconds=self._timeout)
            except BaseException:
                connection.close()
                raise
        except (StoreError, OSError):
            self._failed()
            raise
        return Frames[Answer](connection, Answer)

    def _failed(self) -> None:
        with self._lock:
            self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
            self._again = self._clock() + self._pause
            idle, self._idle = self._idle, []
        for frames in idle:
            frames.connection.close()


def _expect[T: StoreMessage](frames: Frames[Answer], kind: type[T]) -> T:
    answer = frames.receive()
    if not isinstance(answer, kind):
        raise StoreError(f"{type(answer).__name__} instead of {kind.__name__}")
    return answer


def _ended(connection: socket.socket) -> bool:
    """Whether the other side has closed an idle connection, or sent something without being asked."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
