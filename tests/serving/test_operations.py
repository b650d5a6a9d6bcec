"""Operations on a server process: probes, reloads, logs."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from jengine.serving.grpc.client import Client, ServerError
from jengine.serving.guards.security import hash_line
from tests.serving.certificates import Authority
from tests.serving.leaks import wait_until
from tests.serving.processes import ServerProcess, free_port, mock_process
from tests.serving.test_app import Stream

OLD, NEW = "o" * 32, "n" * 32


def probe(address: str, path: str) -> tuple[int, str]:
    """Status and text; 0 if there is no server."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_probes_while_it_starts(tokenizer_folder: Path, tmp_path: Path) -> None:
    port, mark = free_port(), tmp_path / "mark"
    slow = {"engine": "tests.serving.faulty_engines:starts_slowly", "mark": str(mark)}
    with mock_process(tokenizer_folder, server={"metrics_port": port}, **slow) as server:
        address = f"127.0.0.1:{port}"
        wait_until(lambda: probe(address, "/healthz") == (200, "ok\n"))
        assert probe(address, "/readyz") == (503, "starting: loading libraries\n")
        assert probe(address, "/metrics")[0] == 200 and probe(address, "/anything")[0] == 404
        wait_until(mark.exists)
        server.send(signal.SIGTERM)
        assert server.wait() == (0, "")


def test_probes_after_a_crash(tokenizer_folder: Path, tmp_path: Path) -> None:
    once = {
        "engine": "tests.serving.faulty_engines:starts_once",
        "mark": str(tmp_path / "mark"),
        "tokenizer_folder": str(tokenizer_folder),
    }
    with mock_process(tokenizer_folder, vocab_size=501, server={"metrics_port": 0}, **once) as server:
        address = http_of(server)
        assert probe(address, "/readyz") == (200, "ok\n")
        os.kill(server.children()[0], signal.SIGKILL)
        wait_until(
            lambda: probe(address, "/readyz") == (503, "the engine has ended and is being restarted\n")
        )
        assert probe(address, "/healthz") == (200, "ok\n")
        server.send(signal.SIGTERM)
        assert server.wait() == (0, "")


def test_probes_while_it_drains(tokenizer_folder: Path) -> None:
    with mock_process(
        tokenizer_folder, seconds=0.02, server={"metrics_port": 0, "drain_seconds": 100.0}
    ) as server:
        address = http_of(server)
        with Client(server.address) as client:
            stream = Stream(client, max_tokens=1000)
            server.send(signal.SIGINT)
            wait_until(lambda: probe(address, "/readyz")[0] == 503)
            assert (
                probe(address, "/readyz")[1].startswith("stopping") and probe(address, "/healthz")[0] == 200
            )
            server.send(signal.SIGINT)
            assert server.wait()[0] == 130
            stream.thread.join(30)


def http_of(server: ServerProcess) -> str:
    server.wait_until_ready()
    return server.metrics.removeprefix("http://").removesuffix("/metrics")


def test_sighup_reloads_keys_and_certificates(tokenizer_folder: Path, tmp_path: Path) -> None:
    """A reload does not end the server or any request; a broken file changes nothing. Probes need no
    certificate.
    """
    ours, keys, requests = Authority(tmp_path, "ours"), tmp_path / "keys", tmp_path / "requests.jsonl"
    pair, mine = ours.sign("server"), ours.sign("mine")
    keys.write_text(hash_line(OLD, "old"))
    options = {
        "tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(ours.cert),
        "api_keys": str(keys), "metrics_port": 0,
        "request_log": str(requests),
    }  # fmt: skip
    with mock_process(tokenizer_folder, seconds=0.02, server=options) as server:
        address = http_of(server)
        assert probe(address, "/readyz") == (200, "ok\n")
        tls = {"tls_ca": ours.cert, "tls_cert": mine.cert, "tls_key": mine.key}

        def answers(key: str) -> bool:
            with Client(server.address, api_key=key, **tls) as client:
                try:
                    return client.generate([1, 2], max_tokens=2).finished
                except ServerError as error:
                    assert error.code.name == "UNAUTHENTICATED"
                    return False

        def reload(says: str) -> None:
            server.send(signal.SIGHUP)
            wait_until(lambda: says in server.log, lambda: server.log)

        assert answers(OLD) and not answers(NEW)
        with Client(server.address, api_key=OLD, **tls) as client:
            stream = Stream(client, max_tokens=100)
            keys.write_text(hash_line(NEW, "new"))
            fresh = ours.sign("fresh")
            for of, to in ((fresh.cert, pair.cert), (fresh.key, pair.key)):
                to.write_bytes(of.read_bytes())
            reload("reloaded 1 API keys")
            assert "reloaded certificates, valid until" in server.log
            assert answers(NEW) and not answers(OLD)
            keys.write_text("nonsense")
            reload("reload failed, the old files stay in use: api_keys=")
            assert answers(NEW)
            assert stream.end()[:2] == (100, "length"), "what is open goes on"
        assert (
            'jengine:certificate_expiry_timestamp_seconds{model_name="mock"}' in probe(address, "/metrics")[1]
        )
        server.send(signal.SIGTERM)
        assert server.wait() == (0, "")
        assert (
            "wrong" not in server.log.lower().replace("wrong_key", "")
            and "rejected a call from" in server.log
        )
    entries = [json.loads(line) for line in requests.read_text().splitlines()]
    assert sorted((entry["key"], entry["output_tokens"]) for entry in entries) == [
        ("new", 2),
        ("new", 2),
        ("old", 2),
        ("old", 100),
    ]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["--request-log=/nowhere/log"],
            "request_log='/nowhere/log': cannot be written: No such file or directory",
        ),
        (["--max-tokens-limit=0"], "max_tokens_limit=0: must be a whole number, at least 1"),
    ],
)
def test_options_that_cannot_be_used(options: list[str], message: str) -> None:
    import sys

    from tests.serving.processes import process

    with process(
        [sys.executable, "-m", "jengine.cli", "serve", "demo", "--port=none", "--grpc-port=0", *options]
    ) as server:
        assert server.wait(60.0)[0] in (1, 2)
        assert (
            server.log.startswith("jengine: error: ")
            and message in server.log
            and server.log.count("\n") == 1
        ), server.log
