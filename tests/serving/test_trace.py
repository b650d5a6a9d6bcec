"""Traces of a server's engine: permissions and commands."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from jengine import InvalidArgument, Trace, cli, explain
from jengine.serving.grpc.client import AsyncClient, Client, Retries, ServerError
from jengine.serving.grpc.client_messages import GenerateServiceStub
from jengine.serving.guards.security import hash_line
from tests.serving.conftest import MakeServer, MockServer
from tests.serving.leaks import wait_until
from tests.serving.test_ends import ENDLESS, SMALL_WINDOW

ANNA, ADMIN = "a" * 32, "r" * 32


def test_over_grpc(mock_server: MockServer) -> None:
    with Client(mock_server.address) as client:
        trace = client.trace()
        assert (trace.facts.max_num_seqs, trace.facts.pages) == (32, 1024) and trace.readers is not None
        assert explain(client.trace(seconds=0.5)).bound == "idle"
        for seconds in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(InvalidArgument, match=r"^seconds="):
                client.trace(seconds)

        async def main() -> Trace:
            async with AsyncClient(mock_server.address) as other:
                return await other.trace(1.0)

        assert asyncio.run(main()).facts == trace.facts


def test_only_admins_may_ask(
    make_server: MakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n".join((hash_line(ANNA, "anna"), hash_line(ADMIN, "root", "admin=1"))))
    (tmp_path / "anna").write_text(ANNA)
    (tmp_path / "admin").write_text(ADMIN)
    with (
        make_server(server={"api_keys": keys}) as server,
        Client(server.address, api_key=ANNA, retries=Retries(attempts=1)) as anna,
    ):
        with pytest.raises(ServerError, match="admin=1"):
            anna.trace()
        assert cli.main(["explain", server.address, "--api-key-file", str(tmp_path / "anna")]) == 2
        assert "admin=1" in capsys.readouterr().err
        assert cli.main(["explain", server.address, "--api-key-file", str(tmp_path / "admin")]) == 0
        assert capsys.readouterr().out == "No steps were recorded.\n"


def test_commands(mock_server: MockServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "of the server.json"
    assert cli.main(["trace", mock_server.address, "--output", str(file), "--seconds", "5"]) == 0
    assert "https://ui.perfetto.dev" in capsys.readouterr().err and "traceEvents" in json.loads(
        file.read_text()
    )
    assert cli.main(["explain", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "bound": "idle",
        "seconds": 0,
        "steps": 0,
        "shares": {},
        "findings": [],
    }
    for arguments, message in (
        (["trace", mock_server.address, "--seconds", "0"], "seconds=0.0: must be a finite number above 0"),
        (
            ["trace", mock_server.address, "--output", str(tmp_path / "none" / "x")],
            "cannot be written: No such file",
        ),
        (
            ["trace", "nofile.json"],
            (
                "server='nofile.json': must be HOST:PORT of a running server; `jengine explain` reads saved"
                " traces"
            ),
        ),
        (["trace", str(file)], "must be HOST:PORT of a running server"),
        (["explain", str(tmp_path / "anna")], "jengine: error: "),
        (["explain", __file__], "was not saved by `jengine trace` or Trace.save"),
    ):
        assert cli.main(arguments) == 2 and message in capsys.readouterr().err


def test_clients_that_do_not_read(make_server: MakeServer) -> None:
    with make_server(max_model_len=2**20, pages=2**18) as server, Client(server.address) as client:
        assert client.trace().readers.waiting == 0  # type: ignore[union-attr]
        with grpc.insecure_channel(server.address, SMALL_WINDOW) as channel:
            stream = GenerateServiceStub(channel).GenerateStream(ENDLESS)
            next(stream)
            wait_until(lambda: client.trace().readers.waiting == 1)  # type: ignore[union-attr]
            [finding] = explain(client.trace()).findings
            assert (
                finding.name == "slow_readers"
                and finding.summary == "1 of 1 streams wait for their clients to read"
            )
            stream.cancel()
        wait_until(lambda: client.trace().readers.streams == 0)  # type: ignore[union-attr]
        server.wait_until_idle()
