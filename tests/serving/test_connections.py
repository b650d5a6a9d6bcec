"""Limits on connections, and metrics that are asked for often."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

import httpx
import pytest

from jengine.serving.http.front import Quota
from jengine.serving.metrics.server_metrics import Recent
from tests.serving.conftest import MakeServer
from tests.serving.leaks import wait_until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def test_connections_are_counted_by_address() -> None:
    quota = Quota(total=3, per_address=2)
    assert quota.enter("a") is quota.enter("a") is None
    assert quota.enter("a") == (
        429,
        "this client has 2 connections, the maximum (max_connections_per_client)",
    )
    assert quota.enter("b") is None
    assert quota.enter("c") == (503, "the server has 3 connections, the maximum (max_connections)")
    quota.leave("a")
    assert quota.enter("c") is None
    for address in "abc":
        quota.leave(address)
    assert quota._open.total() == 0 and not +quota._open


@pytest.mark.parametrize("option, status", [("max_connections_per_client", 429), ("max_connections", 503)])
def test_idle_connections_have_a_limit(make_server: MakeServer, option: str, status: int) -> None:
    with make_server(server={"port": 0, option: 3}) as server:
        url = httpx.URL(server.http)
        idle = [socket.create_connection((url.host, url.port)) for _ in range(3)]
        body = {"prompt": "a", "max_tokens": 1}

        def sent() -> httpx.Response:
            return httpx.post(f"{server.http}/completions", json=body)

        wait_until(lambda: sent().status_code == status)
        refused = sent()
        assert option in refused.json()["error"]["message"] and refused.headers["retry-after"] == "1"
        silent = socket.create_connection((url.host, url.port))  # asks for nothing, and is closed
        silent.settimeout(60)
        assert silent.recv(1) == b""
        idle.pop().close()
        wait_until(lambda: sent().status_code == 200)
        for one in [silent, *idle]:
            one.close()
        wait_until(lambda: sent().status_code == 200)


def test_grpc_connections_have_a_limit(make_server: MakeServer) -> None:
    with make_server(server={"max_connections": 3}) as server:
        host, _, port = server.address.rpartition(":")

        def connected() -> socket.socket | None:
            """A connection to which the server has answered; None if it was closed."""
            one = socket.create_connection((host.strip("[]"), int(port)), 60)
            with contextlib.suppress(ConnectionError):
                one.sendall(PREFACE)
                if one.recv(1):
                    return one
            one.close()
            return None

        opened = [connected() for _ in range(5)]
        assert [one is not None for one in opened] == [True, True, True, False, False]
        for one in opened:
            if one is not None:
                one.close()
        again: list[socket.socket] = []
        wait_until(lambda: again.extend(one for one in [connected()] if one is not None) or again)
        again[0].close()


def test_concurrent_requests_share_metrics() -> None:
    made: list[int] = []
    go = threading.Event()

    def make() -> bytes:
        made.append(1)
        assert go.wait(60)
        return b"text"

    async def ask() -> list[bytes]:
        recent = Recent(make)
        waiting = [asyncio.create_task(recent.text()) for _ in range(100)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # its client has gone; the others get theirs
        go.set()
        return await asyncio.gather(*waiting[1:])

    assert asyncio.run(ask()) == [b"text"] * 99 and made == [1]


def test_metrics_are_kept_for_a_multiple_of_the_time_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = [0.0], []
    for kind in ("monotonic", "thread_time"):
        monkeypatch.setattr(f"jengine.serving.metrics.server_metrics.time.{kind}", lambda: clock[0])
    monkeypatch.setattr("jengine.serving.metrics.server_metrics.KEEP_FACTOR", 4)
    monkeypatch.setattr(asyncio, "to_thread", at_once)

    def make() -> bytes:
        clock[0] += 2.0
        made.append(clock[0])
        if len(made) == 3:
            raise OSError
        return str(len(made)).encode()

    recent = Recent(make)

    async def ask() -> bytes:
        return await recent.text()

    async def all_of_it() -> None:
        assert await ask() == b"1"
        clock[0] = 9.9
        assert await ask() == b"1"
        clock[0] = 10.0
        assert await ask() == b"2"
        clock[0] += 100.0
        with pytest.raises(OSError):
            await ask()
        assert await ask() == b"4", "what has failed is not kept"

    loop = asyncio.new_event_loop()
    monkeypatch.setattr(loop, "time", lambda: 0.0)
    loop.run_until_complete(all_of_it())
    loop.close()


async def at_once(make: Callable[[], bytes]) -> bytes:
    return make()
