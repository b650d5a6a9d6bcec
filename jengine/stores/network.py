"""Pages over a connection: the store of another process or engine, and the server of its pages."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from jengine.stores.frames import (
    Answer,
    Find,
    Found,
    Frames,
    Keep,
    Kept,
    Load,
    Loaded,
    Question,
    StoreMessage,
    greet,
)
from jengine.stores.memory import PageStore, Part, StoreError

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
        with self._connection() as frames:
            frames.send(Keep(name, b"".join(page)))
            return _expect(frames, Kept).kept

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
        except BaseException as error:
            frames.connection.close()
            if isinstance(error, StoreError | OSError):
                self._failed()
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


log = logging.getLogger(__name__)
IDLE_SECONDS = 600.0  # a connection without questions is closed; clients connect again
MOST_CONNECTIONS = 256  # of clients with the token
MOST_GREETING, MOST_OF_ADDRESS = 128, 16  # connections in the handshake
PAUSE_SECONDS = 0.2  # before the next connection is accepted, if one could not be
MOST_WAIT = 60.0  # seconds that a Find may wait


class PageServer:
    """Answers clients that have the token. Each connection has its own thread.

    Connections in the handshake are counted apart, so that they take no client's place. Beyond their limits,
    the oldest one is closed: a client with the token takes milliseconds.

    Args:
        store: what is served.
        host, port: the address to listen at; port 0: any free one.
        writable: whether clients may add pages.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(
        self,
        store: PageStore,
        token: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        writable: bool = False,
    ) -> None:
        self._store, self._token, self._writable = store, token, writable
        self._listener = socket.create_server((host, port))
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._lock = threading.Lock()  # of the connections
        self._greeting: dict[socket.socket, str] = {}  # their addresses, the oldest connection first
        self._clients = set[socket.socket]()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="page-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes all connections. May be called repeatedly."""
        with self._lock:
            self._closed.set()
            connections = [*self._greeting, *self._clients]
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            _shut(connection)
        self._thread.join()

    def _accept(self) -> None:
        failing = False
        while True:
            try:
                connection, address = self._listener.accept()
                self._start(connection, str(address[0]))
                failing = False
            except (OSError, RuntimeError) as error:  # no descriptor, or no thread
                if self._closed.is_set():
                    return
                if not failing:
                    log.warning("the page server cannot accept a connection: %s", error)
                failing = True
                self._closed.wait(PAUSE_SECONDS)

    def _start(self, connection: socket.socket, address: str) -> None:
        """Serves a connection in a thread. Raises RuntimeError if none can be started."""
        with self._lock:
            closed = self._closed.is_set()
            if not closed:
                self._make_room(address)
                self._greeting[connection] = address
        if closed:
            connection.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="page-server-client", daemon=True
        )
        try:
            thread.start()
        except BaseException:
            self._forget(connection)
            raise

    def _make_room(self, address: str) -> None:
        same = [connection for connection, other in self._greeting.items() if other == address]
        if len(same) < MOST_OF_ADDRESS and len(self._greeting) < MOST_GREETING:
            return
        oldest = same[0] if len(same) >= MOST_OF_ADDRESS else next(iter(self._greeting))
        del self._greeting[oldest]
        _shut(oldest)  # its thread ends

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet(connection, self._token, server=True)
            with self._lock:
                if self._greeting.pop(connection, None) is None or len(self._clients) >= MOST_CONNECTIONS:
                    raise StoreError("the server has no place for it")
                self._clients.add(connection)
            connection.settimeout(IDLE_SECONDS)
            frames = Frames[Question](connection, Question)
            while True:
                self._answer(frames, frames.receive())
        except (StoreError, OSError) as error:
            log.debug("a client of the page server is gone: %s", error)
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._greeting.pop(connection, None)
            self._clients.discard(connection)
            connection.close()

    def _answer(self, frames: Frames[Question], question: Question) -> None:
        match question:
            case Find(names, wait):
                frames.send(Found(self._store.find(names, min(max(wait, 0.0), MOST_WAIT))))
            case Load(names):
                for page in self._store.load(names):
                    frames.send(Loaded(page))
            case Keep(name, page):
                frames.send(Kept(self._writable and self._store.keep(name, [page])))


def _shut(connection: socket.socket) -> None:
    """Wakes the thread that reads a connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
