"""A page server and its clients, over real sockets."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from jengine.stores import frames
from jengine.stores import network as page_server
from jengine.stores.frames import TOKEN as TOKEN_NAME
from jengine.stores.memory import MemoryStore, StoreError
from jengine.stores.network import FIRST_PAUSE, PageServer, RemoteStore

TOKEN = b"a token of this test"
NAMES = [bytes([i]) * 32 for i in range(4)]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(1 << 20, lease=60.0)


@pytest.fixture
def server(store: MemoryStore) -> Iterator[PageServer]:
    server = PageServer(store, TOKEN, writable=True)
    yield server
    server.close()


def leased(store: MemoryStore) -> int:
    return sum(page.until > 0 for page in store._pages.values())


def test_pages_travel(server: PageServer, store: MemoryStore) -> None:
    client = RemoteStore(server.host, server.port, TOKEN)
    assert client.keep(NAMES[0], [b"one", memoryview(b" page")]) and client.keep(NAMES[1], [bytes(100_000)])
    assert client.find(NAMES) == [True, True, False, False] and leased(store) == 2
    assert [*client.load(NAMES[:3])] == [b"one page", bytes(100_000), None] and leased(store) == 0
    some = client.load(NAMES[:2])
    assert next(some) == b"one page"
    some.close()  # what else was asked for is not mistaken for later answers
    assert not client.keep(NAMES[2], [bytes(2 << 20)])
    assert len(client._idle) == 1, "connections are used again"
    client.close()
    reader = PageServer(store, TOKEN)
    client = RemoteStore(reader.host, reader.port, TOKEN)
    assert not client.keep(NAMES[3], [b"page"]), "it only reads"
    assert client.find(NAMES) == [True, True, False, False]
    client.close()
    reader.close()


def test_only_those_with_the_token(server: PageServer) -> None:
    with pytest.raises((StoreError, ConnectionResetError)):
        RemoteStore(server.host, server.port, b"another token ......").find(NAMES)
    for sent in (b"GET / HTTP/1.1\r\n\r\n" * 10, frames.HELLO + bytes(32) + bytes(32)):
        with socket.create_connection((server.host, server.port)) as stranger:
            stranger.sendall(sent)
            heard = bytearray()
            with suppress(ConnectionResetError):
                while data := stranger.recv(1000):
                    heard += data
            assert len(heard) <= len(frames.HELLO) + 32, "only the server's greeting"
    # a client does not send its proof to those who cannot greet, nor believe one without the token
    with socket.create_server(("127.0.0.1", 0)) as false:

        def greet() -> None:
            with false.accept()[0] as connection:
                connection.sendall(frames.HELLO + bytes(32))
                frames.read(connection, len(frames.HELLO) + 64)
                connection.sendall(bytes(32))

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(StoreError, match="the token is wrong"):
            RemoteStore("127.0.0.1", false.getsockname()[1], TOKEN).find(NAMES)
        thread.join()


def test_strangers_take_no_place_of_clients(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections than there are places, which send a byte now and then."""
    monkeypatch.setattr(page_server, "MOST_CONNECTIONS", 1)
    known = RemoteStore(server.host, server.port, TOKEN)
    assert known.find(NAMES) == [False] * 4
    strangers = [socket.create_connection((server.host, server.port)) for _ in range(40)]
    for stranger in strangers:
        with suppress(OSError):  # closed by the server
            stranger.sendall(b"j")
    assert known.find(NAMES) == [False] * 4, "it keeps its place"
    known.close()
    monkeypatch.setattr(page_server, "MOST_CONNECTIONS", 2)
    with closing(RemoteStore(server.host, server.port, TOKEN)) as other:
        assert other.find(NAMES) == [False] * 4, "a client finds a place"
    assert len(server._greeting) <= page_server.MOST_OF_ADDRESS
    for stranger in strangers:
        stranger.close()


def test_a_handshake_has_one_deadline() -> None:
    """However often a byte comes."""
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.05):
            with suppress(OSError):
                theirs.send(b"j")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with pytest.raises((StoreError, TimeoutError)):
            frames.greet(ours, TOKEN, server=True, seconds=0.3)
    finally:
        stop.set()
        thread.join()
        ours.close()
        theirs.close()


@pytest.mark.parametrize("fault", ["descriptors", "threads"])
def test_a_server_outlives_what_the_system_refuses(
    server: PageServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []

    def refused(*_: object) -> None:
        calls.append(time.monotonic())
        if fault == "descriptors":
            raise OSError(errno.EMFILE, "too many open files")
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        if fault == "descriptors":
            patch.setattr(socket.socket, "accept", refused)
        else:
            patch.setattr(threading.Thread, "start", refused)
        for _ in range(2):
            with socket.create_connection((server.host, server.port)) as one:
                if fault == "threads":
                    assert one.recv(1) == b"", "closed at once"
        while len(calls) < 2:
            time.sleep(0.01)
    assert calls[1] - calls[0] >= page_server.PAUSE_SECONDS, "it does not poll"
    with closing(RemoteStore(server.host, server.port, TOKEN)) as client:
        assert client.find(NAMES) == [False] * 4
    assert not server._greeting


def test_frames_are_bounded(server: PageServer) -> None:
    for nonsense in ((frames.MAX_FRAME + 1).to_bytes(4, "big"), b"\0\0\0\1\xc1"):
        with socket.create_connection((server.host, server.port)) as sender:
            frames.greet(sender, TOKEN, server=False)
            sender.sendall(nonsense)
            with suppress(ConnectionResetError):
                assert sender.recv(1) == b""
    with closing(RemoteStore(server.host, server.port, TOKEN)) as client:
        assert client.find(NAMES) == [False] * 4


def test_a_server_that_is_gone_delays_nobody(store: MemoryStore) -> None:
    now = [0.0]
    server = PageServer(store, TOKEN)
    client = RemoteStore(server.host, server.port, TOKEN, clock=lambda: now[0])
    assert client.find(NAMES) == [False] * 4
    server.close()
    with pytest.raises((StoreError, OSError)):
        client.find(NAMES)
    again = PageServer(store, TOKEN, server.host, server.port)
    with pytest.raises(StoreError, match="a moment ago"):
        client.find(NAMES)
    now[0] += FIRST_PAUSE
    assert client.find(NAMES) == [False] * 4
    client.close()
    again.close()


def test_a_page_server_of_its_own(tmp_path: Path) -> None:
    """`python -m jengine.stores`: what it keeps in a folder outlives it."""
    command = [sys.executable, "-m", "jengine.stores", "--port", "0", "--root-dir", str(tmp_path / "pages")]
    refused = subprocess.run(command, capture_output=True, text=True, env={**os.environ, TOKEN_NAME: "short"})
    assert refused.returncode == 2 and "must hold a token of at least 16 bytes" in refused.stderr
    for number in range(2):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, TOKEN_NAME: TOKEN.decode()}
        ) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            with closing(RemoteStore("127.0.0.1", port, TOKEN)) as client:
                assert client.find(NAMES[:1]) == [number > 0]
                assert client.keep(NAMES[0], [b"a page"]) and [*client.load(NAMES[:1])] == [b"a page"]
            process.terminate()
            assert process.wait() == 0
