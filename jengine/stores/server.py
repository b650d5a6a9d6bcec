"""Serves a store's pages to other processes."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

from jengine.stores.frames import Drop, Find, Found, Frames, Keep, Kept, Load, Loaded, Question, greet
from jengine.stores.page_store import PageStore, StoreError

log = logging.getLogger(__name__)
GREETING_SECONDS = 5.0
IDLE_SECONDS = 600.0  # a connection without questions is closed; clients connect again
MOST_CONNECTIONS = 256
MOST_WAIT = 60.0  # seconds that a Find may wait


class PageServer:
    """Answers clients that have the token. Each connection has its own thread.

    Args:
        store: what is served.
        host, port: the address to listen at; port 0: any free one.
        writable: whether clients may add and drop pages.

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
        self._lock = threading.Lock()
        self._connections = set[socket.socket]()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="page-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes all connections. May be called repeatedly."""
        with self._lock:
            self._closed = True
            connections = [*self._connections]
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue
            with self._lock:
                if self._closed or len(self._connections) >= MOST_CONNECTIONS:
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="page-server-client", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(GREETING_SECONDS)
            greet(connection, self._token, server=True)
            connection.settimeout(IDLE_SECONDS)
            frames = Frames[Question](connection, Question)
            while True:
                self._answer(frames, frames.receive())
        except (StoreError, OSError) as error:
            log.debug("a client of the page server is gone: %s", error)
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, frames: Frames[Question], question: Question) -> None:
        match question:
            case Find(names, wait):
                frames.send(Found(self._store.find(names, min(max(wait, 0.0), MOST_WAIT))))
            case Load(names):
                for page in self._store.load(names):
                    frames.send(Loaded(page))
            case Keep(name, page):
                frames.send(Kept(self._writable and self._store.keep(name, [page])))
            case Drop(name):
                if self._writable:
                    self._store.drop(name)
                frames.send(Kept(self._writable))
