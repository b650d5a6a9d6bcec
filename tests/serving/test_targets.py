"""Targets, clients and strategies over the service: what reaches the engine, and which keys may change it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from jengine import InvalidArgument
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client import AsyncClient, Client, Retries, ServerError
from jengine.serving.guards.security import hash_line
from jengine.spi import Request
from tests.serving.conftest import MakeServer, MockServer
from tests.serving.test_refusals import refused

ANNA, ADMIN = "a" * 32, "r" * 32


def levels_of(server: MockServer) -> list[tuple[float | None, float | None, str]]:
    """Service levels of the requests that the engine receives from now on."""
    seen: list[tuple[float | None, float | None, str]] = []
    add = server.engine.add

    def watched(*requests: Request) -> None:
        seen.extend((request.ttft_ms, request.tpot_ms, request.client) for request in requests)
        add(*requests)

    server.engine.add = watched  # type: ignore[method-assign]
    return seen


def test_targets_and_the_keys_name_reach_the_engine(make_server: MakeServer, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join((hash_line(ANNA, "anna"), hash_line(ADMIN, "root", "admin=1"))))
    with make_server(server={"api_keys": file}) as server, Client(server.address, api_key=ANNA) as client:
        seen = levels_of(server)
        client.generate([1, 2], max_tokens=1, ttft_ms=250.0)
        client.chat([{"role": "user", "content": "hi"}], max_tokens=1, tpot_ms=20)
        assert seen == [(250.0, None, "key anna"), (None, 20.0, "key anna")]
        server.wait_until_idle()


def test_targets_must_be_above_zero(mock_server: MockServer) -> None:
    with mock_server.stub() as stub:
        for field in ("ttft_ms", "tpot_ms"):
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), **{field: 0.0})
            code, message, [details] = refused(lambda: stub.Generate(request))  # noqa: B023 (called at once)
            assert code is grpc.StatusCode.INVALID_ARGUMENT and details.field_violations[0].field == field
            assert "a finite number of milliseconds above 0" in message


def test_the_strategy_can_be_changed_while_requests_run(make_server: MakeServer) -> None:
    with make_server() as server, Client(server.address) as client:
        client.set_strategy("latency")
        assert client.generate([1, 2], max_tokens=2).usage and client.load().strategy == "latency"

        async def main() -> None:
            async with AsyncClient(server.address) as other:
                await other.set_strategy("memory")

        asyncio.run(main())
        with pytest.raises(
            InvalidArgument, match="strategy='speed': must be one of throughput, latency, memory, auto"
        ):
            client.set_strategy("speed")
        client.generate([1, 2], max_tokens=2)
        assert client.load().strategy == "memory"


def test_only_admins_may_change_it(make_server: MakeServer, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join((hash_line(ANNA, "anna"), hash_line(ADMIN, "root", "admin=1"))))
    with (
        make_server(server={"api_keys": file}) as server,
        Client(server.address, api_key=ANNA, retries=Retries(attempts=1)) as anna,
        Client(server.address, api_key=ADMIN) as admin,
    ):
        with pytest.raises(ServerError, match="admin=1"):
            anna.set_strategy("memory")
        admin.set_strategy("memory")
        admin.generate([1, 2], max_tokens=1)
        assert anna.load().strategy == "memory"
