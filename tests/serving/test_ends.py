"""Early ends of requests: cancelled, too late, aborted, timed out, not read. Their resources are freed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import grpc
import pytest

from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client_messages import GenerateServiceStub
from tests.serving.conftest import MakeServer, MockServer
from tests.serving.test_generate import kinds

ENDLESS = pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=[70, 71, 72]), sampling_params=pb.SamplingParams(max_tokens=10**6)
)
# A client takes 4 MB before it is read, if it is not told otherwise: that is many tokens.
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 65536), ("grpc.http2.bdp_probe", 0)]


@pytest.fixture
def slow(make_server: MakeServer) -> Iterator[MockServer]:
    """One token per 5 ms; two requests run, others wait."""
    with make_server(seconds=0.005, max_num_seqs=2, max_model_len=2**20, pages=2**18) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture
def stub(slow: MockServer) -> Iterator[GenerateServiceStub]:
    with slow.stub() as stub:
        yield stub


def request_of(request_id: str = "", **fields: object) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    request.CopyFrom(ENDLESS)
    request.MergeFrom(pb.GenerateRequest(request_id=request_id, **fields))
    return request


def aborted_by(ending: pb.Ending) -> str:
    """What aborted a completion, with or without tokens by then."""
    assert ending.finish_reason == pb.FINISH_REASON_ABORT
    return ending.stop_text


def test_cancelling_frees_pages(slow: MockServer, stub: GenerateServiceStub) -> None:
    stream = stub.GenerateStream(ENDLESS)
    assert kinds([next(stream), next(stream)]) == ["started", "delta"]
    assert slow.engine.load.free_pages < slow.engine.load.pages
    stream.cancel()
    slow.wait_until_idle()
    unary = stub.Generate.future(ENDLESS)
    while not slow.engine.load.running:
        time.sleep(0.001)
    unary.cancel()
    slow.wait_until_idle()


def test_cancelling_what_waits(slow: MockServer, stub: GenerateServiceStub) -> None:
    running = [stub.GenerateStream(ENDLESS) for _ in range(2)]
    for stream in running:
        assert kinds([next(stream), next(stream)]) == ["started", "delta"]
    waiting = stub.GenerateStream(ENDLESS)
    assert kinds([next(waiting)]) == ["started"], "told before it runs"
    waiting.cancel()
    while slow.engine.load.waiting:
        time.sleep(0.001)
    assert slow.engine.load.running == 2
    for stream in running:
        stream.cancel()


def test_a_deadline_ends_the_request_in_the_engine(slow: MockServer, stub: GenerateServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as late:
        for _ in stub.GenerateStream(ENDLESS, timeout=0.2):
            pass
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    slow.wait_until_idle()
    with pytest.raises(grpc.RpcError) as late:
        stub.Generate(ENDLESS, timeout=0.2)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    slow.wait_until_idle()


def test_timeout_seconds_keeps_what_there_is(slow: MockServer, stub: GenerateServiceStub) -> None:
    answer = stub.Generate(request_of(timeout_seconds=0.2))
    [completion] = answer.completions
    assert aborted_by(completion.ending) == "timeout"
    assert 1 <= len(completion.token_ids) == answer.usage.completion_tokens < 100
    events = list(stub.GenerateStream(request_of(timeout_seconds=0.0)))
    assert kinds(events)[0] == "started"
    assert aborted_by(events[-1].finished.endings[0]) == "timeout"


def test_abort(slow: MockServer, stub: GenerateServiceStub) -> None:
    assert not stub.Abort(pb.AbortRequest(request_id="mine")).found
    stream, unary = stub.GenerateStream(request_of("mine")), stub.Generate.future(request_of("other"))
    assert kinds([next(stream), next(stream)]) == ["started", "delta"]
    assert stub.Abort(pb.AbortRequest(request_id="mine")).found
    *_, last = stream
    assert last.finished.endings[0].finish_reason == pb.FINISH_REASON_ABORT
    assert last.finished.usage.completion_tokens > 0
    assert not stub.Abort(pb.AbortRequest(request_id="mine")).found
    assert stub.Abort(pb.AbortRequest(request_id="other")).found
    assert unary.result().completions[0].ending.finish_reason == pb.FINISH_REASON_ABORT


def test_the_server_closes_in_mid_stream(make_server: MakeServer) -> None:
    with make_server(seconds=0.005) as server, server.stub() as stub:
        stream = stub.GenerateStream(request_of(sampling_params=pb.SamplingParams(max_tokens=500)))
        next(stream)
        server.run(server.llm.close())
        *_, last = stream
        assert aborted_by(last.finished.endings[0]) == "shutdown"


def test_a_slow_reader_loses_his_request_alone(make_server: MakeServer) -> None:
    """A client reads only the first message. Within write_timeout its pages are freed, although it is still
    connected. Others continue."""
    server_options = {"write_timeout": 0.3, "max_waiting": 0, "max_answer_logprobs": 10**9}
    with (
        make_server(
            server=server_options, seconds=0.001, max_num_seqs=2, max_model_len=2**20, pages=2**18
        ) as server,
        server.stub() as stub,
    ):
        request = request_of(sampling_params=pb.SamplingParams(logprobs=20))
        with grpc.insecure_channel(server.address, SMALL_WINDOW) as channel:
            stream = GenerateServiceStub(channel).GenerateStream(request, timeout=40)
            next(stream)
            until = time.monotonic() + 20
            while server.engine.has_work:
                assert time.monotonic() < until
                time.sleep(0.01)
            for _ in range(2):  # his place is free as well: two run at once
                other = stub.GenerateStream(request_of(sampling_params=pb.SamplingParams(max_tokens=100)))
                assert kinds(other)[-1] == "finished"
            with pytest.raises(grpc.RpcError) as slow:
                for _ in stream:
                    pass
            # his own: gRPC may lose the status behind what he has not read
            if slow.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                assert (
                    slow.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    and "slow reader" in slow.value.details()
                )
        server.wait_until_idle()


def test_a_slow_reader_who_goes(make_server: MakeServer) -> None:
    with make_server(
        server={"write_timeout": 0.2, "max_answer_logprobs": 10**9},
        seconds=0.001,
        max_model_len=2**20,
        pages=2**18,
    ) as server:
        with grpc.insecure_channel(server.address, SMALL_WINDOW) as channel:
            next(
                GenerateServiceStub(channel).GenerateStream(
                    request_of(sampling_params=pb.SamplingParams(logprobs=20))
                )
            )
            while server.engine.has_work:
                time.sleep(0.01)
        server.wait_until_idle()


def test_a_pause_is_not_the_end(make_server: MakeServer) -> None:
    """A reader that pauses for less than write_timeout gets everything, in fewer messages."""
    with (
        make_server(server={"write_timeout": 30.0}, max_model_len=2**20, pages=2**18) as server,
        server.stub() as stub,
    ):
        stream = stub.GenerateStream(
            request_of(sampling_params=pb.SamplingParams(max_tokens=20_000, logprobs=5))
        )
        events = [next(stream)]
        time.sleep(0.5)
        events += stream
        tokens = [token for event in events for token in event.delta.token_ids]
        assert len(tokens) == 20_000 == events[-1].finished.usage.completion_tokens and len(events) < 20_000
        assert max(event.ByteSize() for event in events) < 400_000
        assert tokens == [70, 71, 72] * 6666 + [70, 71]
        assert sum(len(event.delta.logprobs) for event in events) == 20_000


def test_a_hundred_clients_that_vanish(slow: MockServer) -> None:
    async def vanish(number: int) -> None:
        async with grpc.aio.insecure_channel(slow.address) as channel:
            stream = GenerateServiceStub(channel).GenerateStream(ENDLESS)
            await stream.read()
            await asyncio.sleep(number % 7 / 1000)

    async def main() -> None:
        await asyncio.gather(*[vanish(number) for number in range(100)])

    asyncio.run(main())
    slow.wait_until_idle()
