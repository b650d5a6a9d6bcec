"""A server between an agent and jengine that passes everything on and remembers it."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

ENDED = ("connection", "transfer-encoding", "keep-alive")
LOST = (ConnectionError, ValueError, http.client.HTTPException)


@dataclass
class Exchange:
    """A request and what came back. `body`: the request's JSON; `text`: the answer so far."""

    path: str
    body: dict[str, Any]
    status: int = 0
    text: str = ""


@dataclass
class Recorder:
    """`url`: of OpenAI's API; `exchanges`: in the order of their requests."""

    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    def take(self) -> list[Exchange]:
        """The exchanges since the last call."""
        taken, self.exchanges = self.exchanges, []
        return taken


@contextmanager
def leaving(client: socket.socket, server: socket.socket) -> Iterator[None]:
    """Ends the connection to the server if the client leaves, which makes its socket readable."""
    here, there = socket.socketpair()

    def watch() -> None:
        if here not in select.select([client, here], [], [])[0]:
            with contextlib.suppress(OSError):  # the answer has just ended
                server.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        there.close()  # so that this end becomes readable
        thread.join()
        here.close()


@contextmanager
def recording(server: str) -> Iterator[Recorder]:
    """`server`: the address of jengine's API, with /v1."""
    place = urlsplit(server)
    recorder = Recorder()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on(b"")

        def do_POST(self) -> None:
            self._pass_on(self.rfile.read(int(self.headers.get("content-length", 0))))

        def _pass_on(self, body: bytes) -> None:
            exchange = Exchange(self.path, json.loads(body) if body else {})
            recorder.exchanges.append(exchange)
            upstream = http.client.HTTPConnection(place.hostname or "", place.port, timeout=600)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            # a server that ends leaves chunks without a length
            with contextlib.closing(upstream), contextlib.suppress(*LOST):
                upstream.request(self.command, self.path, body, headers)
                with leaving(self.connection, upstream.sock):
                    answer = upstream.getresponse()
                    exchange.status = answer.status
                    self.send_response(answer.status)
                    for name, value in answer.getheaders():
                        if name.lower() not in ENDED:
                            self.send_header(name, value)
                    self.send_header("connection", "close")
                    self.end_headers()
                    while part := answer.read1(65536):
                        exchange.text += part.decode(errors="replace")
                        self.wfile.write(part)
                        self.wfile.flush()
            self.close_connection = True

        def log_message(self, *words: object) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    recorder.url = f"http://127.0.0.1:{made.server_port}/v1"
    try:
        yield recorder
    finally:
        made.shutdown()
        thread.join()
        made.server_close()
