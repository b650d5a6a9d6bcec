"""The RPC `Do`: administrators' operations by name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from jengine import InvalidArgument, Trace
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client import AsyncClient, Client, Retries, ServerError
from jengine.serving.guards.security import hash_line
from tests.serving.conftest import MakeServer, MockServer
from tests.serving.test_refusals import refused

ANNA, ADMIN = "a" * 32, "r" * 32


def test_operations(make_server: MakeServer) -> None:
    with make_server() as server, Client(server.address) as client:
        assert client.do("SetStrategy", strategy="latency") is None
        client.generate([1, 2], max_tokens=2)
        assert client.load().strategy == "latency" and client.do("ResetPrefixCache") is True
        with server.stub() as stub:
            answer = stub.Do(pb.DoRequest(operation="GetTrace", arguments_json='{"seconds": 5}')).answer_json
        assert Trace.from_json(answer).steps == []

        async def main() -> object:
            async with AsyncClient(server.address) as other:
                return await other.do("ResetPrefixCache")

        assert asyncio.run(main()) is True


@pytest.mark.parametrize(
    "operation, arguments, field, limit",
    [
        (
            "Sleep",
            "",
            "operation",
            "must be one of GetTrace, ListLoras, ResetPrefixCache, SetStrategy, UnloadLora",
        ),
        ("", "", "operation", "must be one of"),
        # names a file
        (
            "WriteProfile",
            '{"options": {}, "folder": "/tmp/x", "asking": 1}',
            "operation",
            "must be one of GetTrace, ",
        ),
        (
            "SetStrategy",
            '{"strategy": "speed"}',
            "strategy",
            "must be one of throughput, latency, memory, auto",
        ),
        ("SetStrategy", "", "arguments_json", "missing required field `strategy`"),
        ("SetStrategy", '{"strategy": "auto", "at": 3}', "arguments_json", "unknown field `at`"),
        ("ResetPrefixCache", "[" * 100_000, "arguments_json", "Expected `object`, got `array`"),
        ("GetTrace", '{"seconds": "1"}', "arguments_json", "got `str` - at `$.seconds`"),
        ("GetTrace", '{"seconds": -1}', "seconds", "must be a finite number above 0"),
    ],
)
def test_what_is_refused(
    mock_server: MockServer, operation: str, arguments: str, field: str, limit: str
) -> None:
    with mock_server.stub() as stub:
        code, message, [details] = refused(
            lambda: stub.Do(pb.DoRequest(operation=operation, arguments_json=arguments))
        )
    assert code is grpc.StatusCode.INVALID_ARGUMENT and limit in message
    assert details.field_violations[0].field == field


def test_what_a_client_cannot_send(mock_server: MockServer) -> None:
    with Client(mock_server.address) as client:
        for operation, argument in ((3, "auto"), ("SetStrategy", object())):
            with pytest.raises(InvalidArgument, match="cannot be sent"):
                client.do(operation, strategy=argument)  # type: ignore[arg-type]


def test_only_administrators(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n".join((hash_line(ANNA, "anna"), hash_line(ADMIN, "root", "admin=1"))))
    with (
        make_server(server={"api_keys": keys}) as server,
        Client(server.address, api_key=ANNA, retries=Retries(attempts=1)) as anna,
        Client(server.address, api_key=ADMIN) as admin,
    ):
        for operation in ("ResetPrefixCache", "Sleep"):  # which operations exist is not for anna, either
            with pytest.raises(ServerError, match="admin=1"):
                anna.do(operation)
        assert admin.do("ResetPrefixCache") is True
    monkeypatch.setattr(
        "jengine.serving.guards.admission.is_loopback", lambda peer: not peer.startswith("ipv4:127.")
    )
    with make_server() as server, server.stub() as stub:
        code, message, _ = refused(lambda: stub.Do(pb.DoRequest(operation="ResetPrefixCache")))
        assert code is grpc.StatusCode.PERMISSION_DENIED and "the server's machine" in message
