"""Standard behaviour for any client: health, reflection, keepalive, and robustness against garbage."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jengine import InvalidArgument
from jengine.serving.calls.model_provider import FixedModel
from jengine.serving.config import ServerConfig
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc import server
from jengine.serving.grpc.server import build_server
from tests.serving.conftest import MockServer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # how a client of HTTP/2 begins


def test_reflection(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    services = set(database.get_services())
    assert services == {
        "jengine.v1.GenerateService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    file = database.FindFileContainingSymbol("jengine.v1.GenerateService")
    assert file.SerializeToString() == pb.DESCRIPTOR.serialized_pb


def test_health(channel: grpc.Channel) -> None:
    stub = HealthStub(channel)
    for service in ("", "jengine.v1.GenerateService"):
        assert (
            stub.Check(health_pb2.HealthCheckRequest(service=service)).status
            == health_pb2.HealthCheckResponse.SERVING
        )
    with pytest.raises(grpc.RpcError) as unknown:
        stub.Check(health_pb2.HealthCheckRequest(service="other"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_new_server_is_not_yet_serving(mock_server: MockServer) -> None:
    async def main() -> list[int]:
        built = await build_server(ServerConfig(grpc_port=0), FixedModel(mock_server.llm, None))  # type: ignore[arg-type]
        await built.server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{built.port}") as channel:
            checks = [
                await HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
                for service in ("", "jengine.v1.GenerateService")
            ]
        await built.server.stop(None)
        return [check.status for check in checks]

    assert asyncio.run(main()) == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2


def test_a_port_that_is_taken(mock_server: MockServer) -> None:
    port = int(mock_server.address.rpartition(":")[2])

    async def main() -> None:
        await build_server(ServerConfig(grpc_port=port), FixedModel(mock_server.llm, None))  # type: ignore[arg-type]

    with pytest.raises(InvalidArgument) as taken:
        asyncio.run(main())
    assert (taken.value.field, taken.value.value) == ("grpc_port", port) and "in use" in taken.value.limit


def test_a_second_server_needs_another_port_for_http_only(
    mock_server: MockServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC is off in the second one, unless its port was chosen, or something needs it."""
    port = int(mock_server.address.rpartition(":")[2])
    monkeypatch.setattr(server, "DEFAULT_PORT", port)

    async def bound(**options: Any) -> int | None:
        return (await build_server(ServerConfig(**options), FixedModel(mock_server.llm, None))).port  # type: ignore[arg-type]

    assert asyncio.run(bound(port=0)) is None
    assert f"gRPC is off: it cannot listen on 127.0.0.1:{port}: Address already in use" in caplog.text
    for needed in ({"port": None}, {"port": 0, "smg_api": True}, {"port": 0, "grpc_port": port}):
        with pytest.raises(InvalidArgument, match=f"grpc_port={port}: cannot listen on 127.0.0.1:{port}"):
            asyncio.run(bound(**needed))


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """An HTTP/2 frame of the connection (stream 0)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + payload


def test_pings_are_welcome(mock_server: MockServer) -> None:
    """A client may ping as often as it likes: gRPC's own limits would close its connection after three, as a
    nuisance.
    """
    settings, ping, goaway, ack = 4, 6, 7, 1
    host, port = mock_server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(PREFACE + frame(settings))
        received, pongs = connection.makefile("rb"), 0
        for number in range(20):
            connection.sendall(frame(ping, number.to_bytes(8, "big")))
            while pongs <= number:
                head = received.read(9)
                received.read(int.from_bytes(head[:3], "big"))
                assert head[3] != goaway
                pongs += head[3] == ping and head[4] == ack
    assert pongs == 20


def test_garbage_on_the_port(mock_server: MockServer) -> None:
    host, port = mock_server.address.split(":")
    for garbage in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * 10_000,
        b"\xff" * 10_000,
        PREFACE + b"\x00\xff\xff\x01" * 2000,
        PREFACE,
    ):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(garbage)
            connection.settimeout(0.3)
            try:
                while connection.recv(65536):
                    pass
            except (TimeoutError, ConnectionError):
                pass
    with mock_server.stub() as stub:
        assert stub.Generate(pb.GenerateRequest(text="still here")).usage.completion_tokens == 16


def test_what_is_no_message(channel: grpc.Channel, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes that are not a GenerateRequest, and methods that do not exist."""
    for method in ("Generate", "GenerateStream"):
        call = channel.unary_unary(f"/jengine.v1.GenerateService/{method}")
        with pytest.raises(grpc.RpcError) as wrong:
            call(b"\xff\xff\xff\xff")
        assert wrong.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "parsed" in wrong.value.details()
    with pytest.raises(grpc.RpcError) as wrong:
        channel.unary_unary("/jengine.v1.GenerateService/Nothing")(b"")
    assert wrong.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not caplog.records
