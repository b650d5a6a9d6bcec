"""Faults at the HTTP port: clients that vanish, do not read or send too much, keys, limits, TLS, and a killed
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from starlette.applications import Starlette

from jengine import InvalidArgument
from jengine.serving.config import ServerConfig
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.guards.security import hash_line
from jengine.serving.http import calls
from jengine.serving.http import front as connections
from jengine.serving.http.front import HttpFront
from tests.serving.certificates import Authority
from tests.serving.conftest import MakeServer, MockServer
from tests.serving.leaks import wait_until
from tests.serving.processes import mock_process
from tests.serving.test_generate import kinds

ENDLESS = {"model": "mock", "prompt": [70, 71, 72], "max_tokens": 10**6}
ENGINE: dict[str, Any] = {"seconds": 0.002, "max_model_len": 2**20, "pages": 2**24}
KEY = "k" * 32
TYPE = "Content-Type: application/json\r\n"


@pytest.fixture
def server(make_server: MakeServer) -> Iterator[MockServer]:
    with make_server(server={"port": 0, "write_timeout": 0.5}, **ENGINE) as server:
        yield server
        server.wait_until_idle()


def client_of(server: MockServer, **options: Any) -> OpenAI:
    return OpenAI(**{"base_url": server.http, "api_key": "none", "max_retries": 0, "timeout": 60, **options})


def connect(server: MockServer, receive_buffer: int | None = None) -> socket.socket:
    url = httpx.URL(server.http)
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((url.host, url.port))
    connection.settimeout(60)
    return connection


def received(connection: socket.socket) -> bytes:
    """Everything received until the server closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):  # it has not read all
        while part := connection.recv(65536):
            answer += part
    return answer


def listens(url: httpx.URL) -> bool:
    try:
        socket.create_connection((url.host, url.port), timeout=60).close()
    except ConnectionError:
        return False
    return True


def post(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{TYPE}Content-Length: {len(data)}\r\n\r\n".encode() + data


# --- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_vanish(server: MockServer, stream: bool, reset: bool) -> None:
    """40 at a time, of whom 32 run and the others wait."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(40)]
        for connection in connections:
            connection.sendall(post({**ENDLESS, "stream": stream}))
        wait_until(lambda: (server.engine.load.running, server.engine.load.waiting) == (32, 8))
        for connection in connections:
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.wait_until_idle()
    with client_of(server) as client:
        assert (
            client.completions.create(model="mock", prompt=[70], max_tokens=2).choices[0].finish_reason
            == "length"
        )


def test_a_stream_that_is_closed(server: MockServer) -> None:
    with client_of(server) as client:
        with client.completions.create(**ENDLESS, stream=True) as stream:  # type: ignore[call-overload]
            assert next(stream).choices[0].text
            assert server.engine.has_work
        server.wait_until_idle()


def test_timeouts(server: MockServer) -> None:
    """The client's, which goes, and the request's."""
    with client_of(server, timeout=0.5) as client, pytest.raises(openai.APITimeoutError):
        client.completions.create(**ENDLESS)  # type: ignore[call-overload]
    server.wait_until_idle()
    with client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match="timeout") as late:
            client.completions.create(**ENDLESS, extra_body={"timeout": 0.3})  # type: ignore[call-overload]
        assert late.value.status_code == 504
    server.wait_until_idle()


# --- clients that do not read or write ------------------------------------------------------------


def test_a_client_that_never_reads(make_server: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """Its request ends by write_timeout, others go on meanwhile."""
    options = {"port": 0, "write_timeout": 0.5, "max_answer_logprobs": 10**9}
    with (
        make_server(server=options, **{**ENGINE, "seconds": 0.0005}) as server,
        connect(server, receive_buffer=4096) as connection,
        client_of(server) as client,
    ):
        connection.sendall(post({**ENDLESS, "stream": True, "n": 16, "logprobs": 20}))
        with client.completions.create(**ENDLESS, stream=True) as stream:  # type: ignore[call-overload]
            wait_until(lambda: bool(next(stream).choices[0].text) and server.engine.load.running == 17)
            wait_until(lambda: bool(next(stream).choices[0].text) and server.engine.load.running == 1)
        server.wait_until_idle()
    assert "left an answer unread for 0.5 s" in caplog.text


def test_heads_and_bodies_that_do_not_come(server: MockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(calls, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(calls, "DISCARD_SECONDS", 0.1)
    for sent in (b"", b"POST /v1/comp"):
        with connect(server) as connection:
            connection.sendall(sent)
            assert connection.recv(100) == b""
    with connect(server) as connection:
        connection.sendall(post(ENDLESS)[:-5])
        assert b"408 Request Timeout" in received(connection)


def test_bodies_that_are_too_large(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are rejected before they arrive, with a Content-Length or in chunks."""
    monkeypatch.setattr(calls, "DISCARD_SECONDS", 0.1)
    with make_server(server={"port": 0, "max_message_bytes": 2048}) as server:
        for head in (
            b"Content-Length: 100000\r\n\r\n",
            b"Content-Length: 1%s\r\n\r\n" % (b"0" * 15),
            b"Transfer-Encoding: chunked\r\n\r\n",
        ):
            with connect(server) as connection:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + TYPE.encode() + head)
                if b"chunked" in head:
                    connection.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
                answer = received(connection)
                assert b" 413 " in answer and b"at most 2048 bytes" in answer
        with connect(server) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 100_000)
            with contextlib.suppress(ConnectionError):
                assert b" 400 " in connection.recv(10_000)
        with client_of(server) as client:
            assert client.models.list().data


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 1000,
        b"GET / HTTP/9\r\n\r\n",
    ],
)
def test_garbage(server: MockServer, garbage: bytes) -> None:
    with connect(server) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(garbage + b"\r\n\r\n")
        assert connection.recv(10_000).startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))


def test_requests_one_after_the_other_without_waiting(server: MockServer) -> None:
    """Pipelined; and none has the key, or the end, of the one before."""
    with connect(server) as connection:
        connection.sendall(
            post({**ENDLESS, "max_tokens": 3}) * 3
            + b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        answer = received(connection)
    assert answer.count(b"HTTP/1.1 200") == 3 and answer.count(b"HTTP/1.1 404") == 1


# --- keys and limits ------------------------------------------------------------------------------


def test_keys(make_server: MakeServer, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{hash_line(KEY, 'anna', 'max_streams=2')}\n")
    with make_server(server={"port": 0, "api_keys": file}, **ENGINE) as server:
        for wrong in ("w" * 32, "\udcff"):
            answer = httpx.get(
                f"{server.http}/models",
                headers={"authorization": f"Bearer {wrong}".encode("utf-8", "surrogateescape")},
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        none = httpx.post(f"{server.http}/completions", content=b"{")
        assert none.status_code == 401, "before the body is looked at"
        assert none.json()["error"]["message"] == "an API key is required: `authorization: Bearer KEY`"
        assert httpx.get(server.http.replace("/v1", "/health")).status_code == 200
        assert sum(count for (cause, _), count in server.metrics.rejections.items() if "key" in cause) == 3
        with client_of(server, api_key=KEY) as client:
            with pytest.raises(openai.PermissionDeniedError):
                client.completions.create(**ENDLESS, extra_body={"priority": -1})  # type: ignore[call-overload]
            with server.stub(KEY) as stub:
                stream = stub.GenerateStream(
                    pb.GenerateRequest(
                        token_ids=pb.TokenIds(ids=[70]), sampling_params=pb.SamplingParams(max_tokens=10**6)
                    )
                )
                assert kinds([next(stream)]) == ["started"]
                with client.completions.create(**ENDLESS, stream=True) as second:  # type: ignore[call-overload]
                    assert next(second).choices[0].text
                    with pytest.raises(openai.RateLimitError) as busy:  # gRPC's stream counts as well
                        client.completions.create(model="mock", prompt="x")
                    assert (
                        float(busy.value.response.headers["retry-after"]) > 0
                        and busy.value.code == "rate_limit_exceeded"
                    )
                stream.cancel()
            server.wait_until_idle()
            assert "anna" in server.metrics.by_key


def test_a_refusal_reaches_a_client_that_sends_much(make_server: MakeServer, tmp_path: Path) -> None:
    """The server discards the body, and the connection can be used again."""
    file = tmp_path / "keys"
    file.write_text(hash_line(KEY))
    with (
        make_server(server={"port": 0, "api_keys": file}) as server,
        httpx.Client(base_url=server.http, timeout=60) as client,
    ):
        for _ in range(3):
            assert client.post("/completions", json={"prompt": "x" * 3_000_000}).status_code == 401


def test_limits_without_keys(make_server: MakeServer) -> None:
    options = {
        "port": 0,
        "max_calls_per_client": 3,
        "max_streams_per_client": 3,
        "max_tokens_limit": 1000,
        "max_request_seconds": 5.0,
    }
    with (
        make_server(server=options, **ENGINE) as server,
        client_of(server) as client,
        contextlib.ExitStack() as stack,
    ):
        with pytest.raises(openai.BadRequestError, match="max_tokens_limit"):
            client.completions.create(**ENDLESS)  # type: ignore[call-overload]
        with pytest.raises(openai.BadRequestError, match="max_request_seconds"):
            client.completions.create(model="mock", prompt="x", extra_body={"timeout": 6.0})
        with pytest.raises(openai.BadRequestError, match="at most 3"):
            client.completions.create(model="mock", prompt=["x"] * 2, n=2)
        for _ in range(3):
            connection = stack.enter_context(connect(server))
            connection.sendall(post({**ENDLESS, "max_tokens": 1000}))
        wait_until(lambda: server.engine.load.running == 3)
        with pytest.raises(openai.RateLimitError):
            client.models.list()
        for path in ("/health", "/ping"):
            assert httpx.get(httpx.URL(server.http).join(path), timeout=60).status_code == 200


def test_request_ids_in_use(server: MockServer) -> None:
    with (
        client_of(server) as client,
        client.completions.create(**ENDLESS, stream=True, extra_body={"request_id": "mine"}) as stream,
    ):  # type: ignore[call-overload]
        assert next(stream).id == "cmpl-mine"
        with pytest.raises(openai.ConflictError):
            client.completions.create(model="mock", prompt="x", extra_body={"request_id": "mine"})


# --- a server as a process ------------------------------------------------------------------------


def test_an_engine_that_is_killed_and_a_stop(tokenizer_folder: Path) -> None:
    """Streams end with an error; new requests get a retry time, and are answered later. A stop lets streams
    finish.
    """
    engine = {**ENGINE, "seconds": 0.01}
    with mock_process(tokenizer_folder, server={"port": 0, "drain_seconds": 1.5}, **engine) as server:
        server.wait_until_ready()
        health = server.http.replace("/v1", "/health")
        with OpenAI(base_url=server.http, api_key="none", max_retries=0, timeout=60) as client:
            with client.completions.create(**ENDLESS, stream=True) as stream:  # type: ignore[call-overload]
                assert next(stream).choices[0].text
                os.kill(server.children()[0], signal.SIGKILL)
                with pytest.raises(openai.APIError, match="the engine is not running; try again"):
                    list(stream)
            with pytest.raises(openai.InternalServerError) as down:
                client.completions.create(model="mock", prompt=[70], max_tokens=1)
            assert down.value.status_code == 503 and float(down.value.response.headers["retry-after"]) > 0
            assert httpx.get(health, timeout=60).status_code == 503
            again = client.with_options(max_retries=8)
            assert again.completions.create(model="mock", prompt=[70], max_tokens=1).usage
            assert httpx.get(health, timeout=60).status_code == 200

            ends = [
                client.completions.create(model="mock", prompt=[70], max_tokens=most, stream=True)
                for most in (20, 10**6)
            ]
            for stream in ends:
                assert next(stream).choices[0].text
            server.send(signal.SIGTERM)
            wait_until(lambda: "requests in flight" in server.log)
            wait_until(lambda: not listens(httpx.URL(server.http)))
            assert [event.choices[0].finish_reason for event in ends[0]][-1] == "length"
            with pytest.raises(openai.APIError, match="shutdown"):
                list(ends[1])
            assert server.wait() == (0, "")
        assert "Traceback" not in server.log and "Exception" not in server.log


def test_tls_and_a_reload(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Mutual TLS with a key. A new certificate is for new connections; open ones continue."""
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    pair, new, mine, stranger = (
        ours.sign("server"),
        ours.sign("new"),
        ours.sign("mine"),
        others.sign("stranger"),
    )
    (tmp_path / "keys").write_text(hash_line(KEY, "anna"))
    tls = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(ours.cert)}
    options = {**tls, "api_keys": str(tmp_path / "keys"), "port": 0}

    def trust(own: Any = mine) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(ours.cert))
        context.load_cert_chain(own.cert, own.key)
        return context

    def seen(url: httpx.URL) -> bytes:
        with (
            socket.create_connection((url.host, url.port), timeout=60) as plain,
            trust().wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            return connection.getpeercert(binary_form=True) or b""

    with mock_process(
        tokenizer_folder, server=options, seconds=0.005, max_model_len=2**20, pages=2**20
    ) as server:
        server.wait_until_ready()
        url = httpx.URL(server.http)
        assert url.scheme == "https"
        with OpenAI(
            base_url=server.http,
            api_key=KEY,
            max_retries=0,
            http_client=httpx.Client(verify=trust(), timeout=60),
        ) as client:
            stream = client.completions.create(model="mock", prompt=[70], max_tokens=10**6, stream=True)
            assert next(stream).choices[0].text
            first = seen(url)
            for of, to in ((new.cert, pair.cert), (new.key, pair.key)):
                to.write_bytes(of.read_bytes())
            server.send(signal.SIGHUP)
            wait_until(lambda: "reloaded certificates" in server.log)
            wait_until(lambda: seen(url) != first)
            for _ in range(10):
                assert next(stream).choices[0].text, "what is open goes on"
            stream.close()
            assert client.models.list().data, "on a new connection"
        for context in (trust(stranger), ssl.create_default_context(cafile=str(ours.cert))):
            with httpx.Client(verify=context) as stray, pytest.raises(httpx.TransportError):
                stray.get(f"{server.http}/models")
        with httpx.Client(verify=trust()) as keyless:
            assert keyless.get(f"{server.http}/models").status_code == 401
        server.send(signal.SIGTERM)
        assert server.wait() == (0, "")


def test_a_connection_made_during_a_reload_does_not_stop_the_loop() -> None:
    """Both servers accept from one socket then: the first to find no more connections must not wait."""

    async def reload() -> None:
        front = HttpFront(Starlette(), ServerConfig(port=0))
        await front.start(None)
        listening = front._servers[0][0].servers[0].sockets[0].fileno()
        reloaded = asyncio.create_task(front.reload(None))
        while not reloaded.done():
            assert not os.get_blocking(listening)
            await asyncio.sleep(0)
        await front.close()

    asyncio.run(reload())


def test_a_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            InvalidArgument, match=f"port={port}: cannot listen on 127.0.0.1: Address already in use"
        ):
            asyncio.run(HttpFront(Starlette(), ServerConfig(port=port)).start(None))
