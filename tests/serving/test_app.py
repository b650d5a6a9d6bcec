"""The life of a server, as a process with a mock engine: start, ready, drain, crash, end."""

from __future__ import annotations

import io
import os
import shlex
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from jengine import EngineDead
from jengine.cli import main
from jengine.serving.grpc.client import Client, Retries, ServerError
from jengine.serving.guards.security import hash_line
from jengine.serving.processes import engine_fleet
from tests.serving.certificates import Authority
from tests.serving.leaks import alive, wait_until
from tests.serving.processes import HealthWatch, free_port, mock_process, process, wait_for_server
from tests.serving.streams import Stream

ONCE = Retries(attempts=1)
KEY = "k" * 32


def test_one_line_when_ready_and_none_at_the_end(tokenizer_folder: Path) -> None:
    with mock_process(tokenizer_folder) as server:
        assert server.wait_until_ready()[1] == "mock"
        with Client(server.address) as client, grpc.insecure_channel(server.address) as channel:
            watch = HealthWatch(channel, "jengine.v1.GenerateService")
            watch.wait_for("SERVING")
            assert client.generate([1, 2], max_tokens=3).outputs[0].token_ids == [1, 2, 1]
            [engine] = server.children()
            server.send(signal.SIGTERM)
            assert server.wait() == (0, "")
            assert watch.close()[:2] == ["SERVING", "NOT_SERVING"]
        assert not alive(engine) and "Traceback" not in server.log


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_requests_in_flight_have_time_then_they_are_aborted(
    tokenizer_folder: Path, asked: signal.Signals
) -> None:
    with mock_process(tokenizer_folder, seconds=0.02, server={"drain_seconds": 1.5}) as server:
        server.wait_until_ready()
        with Client(server.address) as client, grpc.insecure_channel(server.address) as channel:
            short, long = Stream(client, max_tokens=25), Stream(client, max_tokens=1000)
            watch = HealthWatch(channel)
            watch.wait_for("SERVING")
            server.send(asked)
            watch.wait_for("SERVING", "NOT_SERVING")
            with Client(server.address, retries=ONCE) as late, pytest.raises(ServerError) as refused:
                late.generate([1], max_tokens=1)
            assert refused.value.code is grpc.StatusCode.UNAVAILABLE
            assert short.end() == (25, "length", None)
            tokens, *why = long.end()
            assert 25 < tokens < 1000 and why == ["abort", "shutdown"]
            assert server.wait() == (0, "")
            watch.close()
        assert "requests in flight have 1.5 s" in server.log and "Traceback" not in server.log


def test_a_second_interrupt_ends_it_at_once(tokenizer_folder: Path) -> None:
    with mock_process(tokenizer_folder, seconds=0.02, server={"drain_seconds": 100.0}) as server:
        server.wait_until_ready()
        with Client(server.address) as client:
            stream = Stream(client, max_tokens=1000)
            [engine] = server.children()
            server.send(signal.SIGINT)
            wait_until(lambda: "stopping" in server.log)
            assert stream.thread.is_alive()
            server.send(signal.SIGINT)
            assert server.wait(10.0)[0] == 130
            stream.thread.join(30)
            assert isinstance(stream.error, ServerError) and stream.error.code is grpc.StatusCode.UNAVAILABLE
        wait_until(lambda: not alive(engine))


def test_before_it_is_ready(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Health is reported, and requests are asked to retry. SIGTERM also interrupts the start."""
    port, mark = free_port(), tmp_path / "mark"
    starts_slowly = {"engine": "tests.serving.faulty_engines:starts_slowly", "mark": str(mark)}
    with mock_process(tokenizer_folder, server={"grpc_port": port}, **starts_slowly) as server:
        address = f"127.0.0.1:{port}"
        wait_for_server(address)
        with Client(address, retries=ONCE) as client, grpc.insecure_channel(address) as channel:
            watch = HealthWatch(channel)
            watch.wait_for("NOT_SERVING")
            for ask in (
                lambda: client.generate([1]),
                client.model,
                client.load,
                lambda: client.tokenize("x"),
            ):
                with pytest.raises(ServerError) as refused:
                    ask()
                assert refused.value.code is grpc.StatusCode.UNAVAILABLE and refused.value.retry_seconds
            wait_until(mark.exists)
            server.send(signal.SIGTERM)
            assert server.wait() == (0, "")
            watch.close()
        wait_until(lambda: not alive(int(mark.read_text())))


def test_an_engine_that_is_killed_is_replaced(tokenizer_folder: Path) -> None:
    with mock_process(tokenizer_folder, seconds=0.02, server={"metrics_port": 0}) as server:
        server.wait_until_ready()
        with Client(server.address) as client, grpc.insecure_channel(server.address) as channel:
            watch = HealthWatch(channel)
            watch.wait_for("SERVING")
            stream = Stream(client, max_tokens=1000)
            [engine] = server.children()
            os.kill(engine, signal.SIGKILL)
            stream.thread.join(10)
            assert isinstance(stream.error, ServerError) and stream.error.code is grpc.StatusCode.UNAVAILABLE
            assert stream.error.retry_seconds is not None, "a client is told when to come again"
            assert client.generate([1, 2], max_tokens=2).outputs[0].token_ids == [1, 2]  # it comes again
            watch.wait_for("SERVING", "NOT_SERVING", "SERVING")
            watch.close()
        metrics = urllib.request.urlopen(server.metrics, timeout=20).read().decode()
        assert 'jengine:engine_restarts_total{model_name="mock"} 1.0' in metrics
        assert server.children() != [engine]
        server.send(signal.SIGTERM)
        assert server.wait() == (0, "")
        assert "the model answers again" in server.log


def test_it_can_be_ended_while_no_engine_will_start(tokenizer_folder: Path, tmp_path: Path) -> None:
    once = {
        "engine": "tests.serving.faulty_engines:starts_once",
        "mark": str(tmp_path / "mark"),
        "tokenizer_folder": str(tokenizer_folder),
    }
    with mock_process(tokenizer_folder, vocab_size=501, **once) as server:
        server.wait_until_ready()
        os.kill(server.children()[0], signal.SIGKILL)
        wait_until(lambda: "the device is not free yet" in server.log)
        server.send(signal.SIGTERM)
        assert server.wait() == (0, "")


@pytest.mark.parametrize("option", ["port", "grpc-port", "metrics-port"])
def test_a_taken_port_is_told(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        other = [f"--{name}=0" for name in ("port", "grpc-port") if name != option]
        with process(
            [sys.executable, "-m", "jengine.cli", "serve", "demo", f"--{option}={number}", *other]
        ) as server:
            assert server.wait() == (1, "")
            name = option.replace("-", "_")
            *before, last = server.log.splitlines()
            assert last.startswith(f"jengine: error: {name}={number}: cannot listen on 127.0.0.1")
            assert "Address already in use" in last and len(before) <= (option == "grpc-port"), server.log


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["/nowhere"], 1, "/nowhere"),
        (
            ["demo", "--max-num-seqs=0"],
            2,
            "max_num_seqs=0: must be a whole number, at least 1 (command line)",
        ),
        (["demo", "--config=/nowhere"], 2, "config='/nowhere': cannot be read"),
        (["demo", "--tls-cert=/nowhere", "--tls-key=/nowhere"], 1, "tls_cert='/nowhere': cannot be read"),
        (["demo", "--api-keys=/nowhere"], 1, "api_keys='/nowhere': cannot be read"),
        ([], 2, "model=None: must be given"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: list[str], code: int, message: str) -> None:
    with process(
        [sys.executable, "-m", "jengine.cli", "serve", "--port=0", "--grpc-port=0", *arguments]
    ) as server:
        assert server.wait(60.0) == (code, "")
        assert server.log.startswith("jengine: error: ") and message in server.log, server.log
        assert server.log.count("\n") == 1, "before it says that it starts, or loads libraries"


def test_http_listens_before_libraries_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()

    class Engine:
        def spawn(self) -> None:
            with socket.create_connection(("127.0.0.1", port)):
                raise EngineDead("it could be reached")

        def quit(self) -> None:
            pass

    monkeypatch.setattr(engine_fleet, "maker", lambda *_: lambda _: Engine())
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with pytest.raises(SystemExit):
        main(["serve", "demo", f"--port={port}", "--grpc-port=none"])
    assert log.getvalue() == "jengine: error: it could be reached\n"
    socket.create_server(("127.0.0.1", port)).close()  # it is free again


def test_the_request_that_it_prints_works(tokenizer_folder: Path) -> None:
    with mock_process(tokenizer_folder, server={"port": 0}) as server:
        server.wait_until_ready()
        command, url, option, header, data, body = shlex.split(server.curl)
        assert (command, option, data) == ("curl", "-H", "-d") and url.startswith(server.http)
        answer = httpx.post(url, headers=[header.split(": ")], content=body, timeout=60)
        assert answer.status_code == 200 and answer.json()["choices"], answer.text


@pytest.mark.parametrize("off", ["port", "grpc_port"])
def test_either_protocol_can_be_off(tokenizer_folder: Path, off: str) -> None:
    with mock_process(tokenizer_folder, server={"port": 0, off: "none"}) as server:
        server.wait_until_ready()
        assert (server.http == "", server.address == "") == (off == "port", off == "grpc_port")
        if server.http:
            assert httpx.get(f"{server.http}/models", timeout=60).status_code == 200
        server.send(signal.SIGTERM)
        assert server.wait() == (0, "")


def test_options_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model = "/nowhere"\nport = 0\ngrpc_port = "none"\n')
    with process([sys.executable, "-m", "jengine.cli", "serve", f"--config={file}"]) as server:
        assert server.wait(60.0) == (1, "") and "/nowhere" in server.log


def test_keys_tls_and_metrics_together(tokenizer_folder: Path, tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    pair, mine = ours.sign("server"), ours.sign("mine")
    (tmp_path / "keys").write_text(hash_line(KEY, "anna"))
    options = {
        "tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(ours.cert),
        "api_keys": str(tmp_path / "keys"),
        "metrics_port": 0, "served_model_name": ("tiny", "small"),
    }  # fmt: skip
    with mock_process(tokenizer_folder, server=options) as server:
        assert server.wait_until_ready()[1] == "tiny"
        tls = {"tls_ca": ours.cert, "tls_cert": mine.cert, "tls_key": mine.key}
        with Client(server.address, api_key=KEY, **tls) as client:
            assert client.generate([1, 2], max_tokens=2, model="small").model == "tiny"
            assert client.generate([1, 2], max_tokens=1).model == "tiny"
        for wrong, code in (
            ({"api_key": "w" * 32, **tls}, "UNAUTHENTICATED"),
            ({"api_key": KEY}, "UNAVAILABLE"),
        ):
            with (
                Client(server.address, retries=ONCE, **wrong) as client,
                pytest.raises(ServerError) as refused,
            ):
                client.generate([1])
            assert refused.value.code.name == code
        credentials = grpc.ssl_channel_credentials(
            ours.cert.read_bytes(), mine.key.read_bytes(), mine.cert.read_bytes()
        )
        with grpc.secure_channel(server.address, credentials) as channel:
            assert HealthStub(channel).Check(HealthCheckRequest()).status == 1, (
                "health is open to those without a key"
            )
        metrics = urllib.request.urlopen(server.metrics, timeout=20).read().decode()
        for line in (
            'jengine:generation_tokens_total{model_name="tiny"} 3.0',
            'jengine:request_success_total{finished_reason="length",model_name="tiny"} 2.0',
            (
                'grpc_server_handled_total{grpc_code="UNAUTHENTICATED",grpc_method="Generate",'
                'grpc_service="jengine.v1.GenerateService"} 1.0'
            ),
            'jengine:kv_cache_usage_perc{model_name="tiny"} 0.0',
        ):
            assert line in metrics
        assert KEY not in server.log
