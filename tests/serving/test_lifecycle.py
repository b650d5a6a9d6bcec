"""The end of a server, and its signals: lame duck, drain, SIGHUP, a closed terminal, a hanging engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from jengine import EngineDead
from jengine.serving.app import Served, ServerApp
from jengine.serving.calls.errors import DETAILS_KEY, reported
from jengine.serving.config import ServerConfig
from jengine.serving.grpc.client import Client, Retries
from tests.serving.leaks import alive, wait_until
from tests.serving.processes import CODE, HealthWatch, longest_stop, mock_process, process
from tests.serving.streams import Stream

ONCE = Retries(attempts=1)


def test_a_stop_is_within_what_kubernetes_grants() -> None:
    assert longest_stop(ServerConfig()) <= 28.0 < 30.0
    assert longest_stop(ServerConfig(lame_duck_seconds=50.0, drain_seconds=0.0)) < 10.0


def test_a_lame_duck_still_answers(tokenizer_folder: Path) -> None:
    """New requests too, while health tells load balancers to leave."""
    with mock_process(
        tokenizer_folder, seconds=0.02, server={"lame_duck_seconds": 3.0, "metrics_port": 0}
    ) as server:
        server.wait_until_ready()
        with Client(server.address) as client, grpc.insecure_channel(server.address) as channel:
            watch = HealthWatch(channel)
            watch.wait_for("SERVING")
            long = Stream(client, max_tokens=250)  # five seconds: beyond the lame duck
            server.send(signal.SIGTERM)
            watch.wait_for("SERVING", "NOT_SERVING")
            with pytest.raises(HTTPError, match="503"):
                urlopen(server.metrics.replace("/metrics", "/readyz"), timeout=20)
            with Client(server.address, retries=ONCE) as late:
                assert late.generate([1, 2], max_tokens=2).outputs[0].token_ids == [1, 2]
            assert long.end() == (250, "length", None)
            assert server.wait() == (0, "")
            watch.close()
        assert "accepting requests for 3 s more" in server.log


@pytest.mark.parametrize("asked, drain", [(signal.SIGINT, 20.0), (signal.SIGTERM, 0.0)])
def test_no_lame_duck_at_a_terminal_or_without_a_drain(
    tokenizer_folder: Path, asked: signal.Signals, drain: float
) -> None:
    with mock_process(
        tokenizer_folder, server={"lame_duck_seconds": 3600.0, "drain_seconds": drain}
    ) as server:
        server.wait_until_ready()
        server.send(asked)
        assert server.wait() == (0, "")


def test_it_stops_though_its_engine_hangs(tokenizer_folder: Path) -> None:
    with mock_process(
        tokenizer_folder, seconds=0.02, server={"drain_seconds": 0.5, "watchdog_seconds": 0}
    ) as server:
        server.wait_until_ready()
        with Client(server.address) as client:
            stream = Stream(client, max_tokens=1000)
            [engine] = server.children()
            os.kill(engine, signal.SIGSTOP)
            server.send(signal.SIGTERM)
            assert server.wait() == (0, "") and not alive(engine)
            assert stream.end()[1:] == ("abort", "shutdown")


# --- SIGHUP ----------------------------------------------------------------------------------------


def test_a_hang_up_ends_nothing(tokenizer_folder: Path) -> None:
    with mock_process(tokenizer_folder, seconds=0.02) as server:
        server.wait_until_ready()
        with Client(server.address) as client:
            stream = Stream(client, max_tokens=50)
            for pid in (server.pid, *server.children()):
                os.kill(pid, signal.SIGHUP)
            wait_until(lambda: "SIGHUP" in server.log)
            assert stream.end() == (50, "length", None)
            assert client.generate([1, 2], max_tokens=2).outputs[0].token_ids == [1, 2]


def test_a_hang_up_reloads() -> None:
    app = ServerApp(ServerConfig(), [Served("mock", lambda on_end: pytest.fail("no engine is wanted"))])
    called: list[int] = []
    app.reloads += [lambda: called.append(1), lambda: called.append(2)]
    app._reload()
    assert called == [1, 2]


# Takes the terminal in its first argument for its own, then becomes the command in the others.
AT_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else it is ignored where the tests were started by nohup
os.setsid()
os.open(sys.argv[1], os.O_RDWR)
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="terminals differ")
def test_a_closed_terminal_drains(tokenizer_folder: Path) -> None:
    ours, theirs = os.openpty()
    arguments = (
        '[{"port": null, "grpc_port": 0}, "tests.mocks.mock_engine:mock_engine", {"seconds": 0.02,'
        ' "vocab_size": 501, "tokenizer_folder": "%s"}]'
    )
    server_command = [sys.executable, "-c", CODE, arguments % tokenizer_folder]
    with process([sys.executable, "-c", AT_TERMINAL, os.ttyname(theirs), *server_command]) as server:
        os.close(theirs)
        server.wait_until_ready()
        with Client(server.address) as client:
            stream = Stream(client, max_tokens=50)
            os.close(ours)
            assert stream.end() == (50, "length", None)
            assert server.wait() == (0, "")


# --- when to come again ----------------------------------------------------------------------------


def test_a_refusal_says_what_the_provider_expects() -> None:
    class Service:
        _models = SimpleNamespace(retry_seconds=7.5)

        @reported
        async def Ask(self, request: object, context: object) -> None:
            raise EngineDead("it is starting")

    aborted: list[Any] = []

    class Context:
        async def abort(self, *status: Any) -> None:
            aborted.extend(status)

    asyncio.run(Service().Ask(None, Context()))
    code, _, ((key, details),) = aborted
    retry = RetryInfo()
    assert code is grpc.StatusCode.UNAVAILABLE and key == DETAILS_KEY
    assert Status.FromString(details).details[0].Unpack(retry) and retry.retry_delay.ToMilliseconds() == 7500
