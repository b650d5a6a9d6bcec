"""External faults over real sockets and processes: an engine killed under load, clients that vanish or do not
read, garbage.

The server continues, and leaks nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client import Client
from jengine.serving.grpc.client_messages import GenerateServiceStub, retry_seconds
from tests.serving.leaks import wait_until
from tests.serving.processes import ServerProcess, mock_process

ENGINE = {"seconds": 0.002, "max_model_len": 2**20, "pages": 2**24}
ENDLESS = pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=[70, 71, 72]), sampling_params=pb.SamplingParams(max_tokens=10**6)
)


# threads that gRPC adds to its pool where the cores are busy, and keeps: a leak would be one for each of many
# clients
SPARE = 4


def held(server: ServerProcess) -> dict[str, int]:
    """Resources of the server's process; children include zombies."""
    folder = Path(f"/proc/{server.pid}")
    counts = {name: len(os.listdir(folder / name)) for name in ("fd", "task")}
    return {**counts, "children": len(server.children())}


def wait_until_idle(client: Client) -> None:
    """Waits until no request runs or waits in the engine, and every page is free."""

    def idle() -> bool:
        load = client.load()
        return (load.running, load.waiting, load.free_pages) == (0, 0, load.pages)

    wait_until(idle, lambda: str(client.load()))


def wait_until_held(server: ServerProcess, before: dict[str, int]) -> None:
    def same() -> bool:
        now = held(server)
        fewer = now["fd"] <= before["fd"] and now["task"] <= before["task"] + SPARE
        return fewer and now["children"] == before["children"]

    wait_until(same, lambda: f"{before} became {held(server)}")


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[tuple[ServerProcess, Client]]:
    """A server and a client that stays, so that resources of other clients can be counted."""
    with mock_process(folder, server=options, **ENGINE) as server:
        server.wait_until_ready()
        with Client(server.address) as client:
            assert answers(client)
            yield server, client
            assert answers(client)
        assert "Traceback" not in server.log, server.log


def answers(client: Client) -> bool:
    return client.generate([1, 2], max_tokens=3).outputs[0].token_ids == [1, 2, 1]


# --- the engine is killed -------------------------------------------------------------------------


def test_an_engine_killed_under_32_streams(tokenizer_folder: Path) -> None:
    """All clients get an error within 2 s, with a retry time. The service recovers, and nothing is left of
    the dead engine.
    """

    async def main() -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            await kill_and_recover(server, channel)
            before = held(server)  # with what a process makes once, such as an executor's threads
            for _ in range(2):
                await kill_and_recover(server, channel)
                wait_until_idle(client)
                wait_until_held(server, before)

    with serving(tokenizer_folder) as (server, client):
        asyncio.run(main())


async def kill_and_recover(server: ServerProcess, channel: grpc.aio.Channel) -> None:
    stub, health = GenerateServiceStub(channel), HealthStub(channel).Watch(HealthCheckRequest())
    assert (await health.read()).status == HealthCheckResponse.SERVING
    streams = [stub.GenerateStream(ENDLESS) for _ in range(32)]
    for stream in streams:
        assert [(await stream.read()).WhichOneof("event") for _ in range(2)] == ["started", "delta"]
    [engine] = server.children()
    os.kill(engine, signal.SIGKILL)
    async with asyncio.timeout(2):
        ends = await asyncio.gather(*map(end_of, streams))
    assert all(end.code() is grpc.StatusCode.UNAVAILABLE and (retry_seconds(end) or 0) > 0 for end in ends), (
        ends
    )
    for state in (HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVING):
        assert (await health.read()).status == state
    health.cancel()
    short = pb.GenerateRequest(token_ids=ENDLESS.token_ids, sampling_params=pb.SamplingParams(max_tokens=5))
    assert (await stub.Generate(short)).completions[0].token_ids == [70, 71, 72, 70, 71]


async def end_of(stream: grpc.aio.UnaryStreamCall) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as end:
        while await stream.read() is not grpc.aio.EOF:
            pass
    return end.value


# --- clients that vanish or do not read -----------------------------------------------------------

# Each of `count` clients has a connection of its own and begins one stream. None says good-bye.
CLIENTS = """
import asyncio, sys
import grpc
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client_messages import GenerateServiceStub

async def main(address, count, request):
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(int(count))]
    message = pb.GenerateRequest.FromString(bytes.fromhex(request))
    streams = [GenerateServiceStub(channel).GenerateStream(message) for channel in channels]
    for stream in streams:
        assert (await stream.read()).WhichOneof("event") == "started"
    print("begun", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def clients(address: str, count: int, request: pb.GenerateRequest) -> Iterator[subprocess.Popen[str]]:
    """A process of clients whose requests run, for this context. Only the kernel reports their end to the
    server.
    """
    command = [sys.executable, "-c", CLIENTS, address, str(count), request.SerializeToString().hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.full)])
def test_clients_that_vanish(tokenizer_folder: Path, rounds: int) -> None:
    """200 at a time, of whom 32 run and the others wait."""
    with serving(tokenizer_folder) as (server, client):
        before = held(server)
        for _ in range(rounds):
            with clients(server.address, 200, ENDLESS):
                assert held(server)["fd"] >= before["fd"] + 200
                wait_until(lambda: (client.load().running, client.load().waiting) == (32, 168))
            wait_until_idle(client)
        wait_until_held(server, before)


def test_a_client_that_never_reads(tokenizer_folder: Path) -> None:
    """Its process is stopped, so that nothing is read from its socket.

    Its request ends after write_timeout, others continue meanwhile, and when it is gone no resources are held
    for it.
    """
    verbose = pb.GenerateRequest()
    verbose.CopyFrom(ENDLESS)
    verbose.sampling_params.MergeFrom(pb.SamplingParams(n=8, logprobs=20))
    with serving(tokenizer_folder, write_timeout=0.5, max_answer_logprobs=10**9) as (server, client):
        before = held(server)
        with clients(server.address, 1, verbose) as process:
            process.send_signal(signal.SIGSTOP)
            stream = client.stream([1, 2], max_tokens=10**6)
            assert next(stream).outputs[0].token_ids and client.load().running == 9
            while client.load().running > 1:
                assert next(stream).outputs[0].token_ids
            stream.close()
        wait_until_idle(client)
        wait_until_held(server, before)


# --- garbage --------------------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def http2_frame(kind: int, flags: int, stream: int, payload: bytes, size: int | None = None) -> bytes:
    """RFC 9113, section 4.1; `size` where the header shall lie."""
    return (
        (len(payload) if size is None else size).to_bytes(3, "big")
        + bytes([kind, flags])
        + stream.to_bytes(4, "big")
        + payload
    )


def garbage() -> dict[str, bytes]:
    noise = random.Random(0).randbytes
    data, headers, settings, window_update, continuation = 0, 1, 4, 8, 9
    opened = PREFACE + http2_frame(settings, 0, 0, b"")
    return {
        "noise": noise(2**16),
        "half a preface": PREFACE[:13],
        "a preface, then noise": PREFACE + noise(2**16),
        "another protocol": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise(512),
        "settings of an odd size": PREFACE + http2_frame(settings, 0, 0, b"12345"),
        "a huge frame": opened + http2_frame(data, 0, 1, bytes(2**20), size=2**24 - 1),
        "huge headers": (
            opened
            + http2_frame(headers, 0, 1, bytes(16000))
            + http2_frame(continuation, 0, 1, bytes(16000)) * 60
        ),
        "headers that cannot be read": opened + http2_frame(headers, 4, 1, noise(1000)),
        "data of a stream that is not open": opened + http2_frame(data, 1, 7, noise(1000)),
        "a window that overflows": opened + http2_frame(window_update, 0, 0, b"\x7f\xff\xff\xff") * 2,
        "frames of no known kind": opened + http2_frame(77, 255, 0, noise(1000)) * 100,
    }


def test_garbage_on_the_port(tokenizer_folder: Path) -> None:
    """The clients keep their connections open."""
    with serving(tokenizer_folder) as (server, client):
        before = held(server)
        host, _, port = server.address.rpartition(":")
        stream = client.stream([1, 2], max_tokens=10**6)
        with ExitStack() as connections:
            for bad in [*garbage().values()] * 5:
                connection = connections.enter_context(socket.create_connection((host, int(port))))
                with contextlib.suppress(ConnectionError):  # the server has hung up already
                    connection.sendall(bad)
                assert next(stream).outputs[0].token_ids
                with Client(server.address) as newcomer:
                    assert answers(newcomer)
        stream.close()
        wait_until_idle(client)
        wait_until_held(server, before)
