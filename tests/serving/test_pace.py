"""Under load tokens gather in fewer messages, and nothing is late at a stream's beginning or end."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from jengine import AsyncLLM, EngineThread, SamplingParams, Tokenizer
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.mock_engine import MockEngine
from jengine.serving.pace import CORES_SHARE, LONGEST, LOOP_SHARE, MESSAGE_SECONDS, Pace
from tests.serving.conftest import MakeServer
from tests.serving.test_generate import kinds


def test_streams_share_the_event_loops_time() -> None:
    pace = Pace(cores=4)
    assert pace.seconds == 0
    with ExitStack() as stack:
        stack.enter_context(pace.stream())
        alone = pace.seconds
        assert 0 < alone < 0.001
        assert alone == pytest.approx(MESSAGE_SECONDS / (4 * CORES_SHARE))
        for _ in range(9):
            stack.enter_context(pace.stream())
        assert pace.seconds == pytest.approx(10 * alone)
        for _ in range(10_000):
            stack.enter_context(pace.stream())
        assert pace.seconds == LONGEST
    assert pace.seconds == 0
    with (large := Pace(cores=100)).stream():
        assert large.seconds == pytest.approx(MESSAGE_SECONDS / LOOP_SHARE), "one event loop, however many cores"


def test_outputs_gather_in_a_pause(tokenizer_folder: Path) -> None:
    """Until it is over; the first and the last output do not wait."""

    async def run() -> None:
        llm = AsyncLLM.over(EngineThread(MockEngine(seconds=0.002, vocab_size=501)), Tokenizer.load(tokenizer_folder))
        params = SamplingParams(max_tokens=300)
        async with llm, llm.submit([70, 71], params, output_kind="delta") as handle:
            first = await anext(handle)
            assert len(first.outputs[0].token_ids) <= 2
            handle.pause(0.1)
            second = await anext(handle)
            assert len(second.outputs[0].token_ids) > 5 and not second.finished
            handle.pause(1000.0)
            last = await asyncio.wait_for(anext(handle), 60)
            assert last.finished
            assert sum(len(output.outputs[0].token_ids) for output in (first, second, last)) == 300

    asyncio.run(run())


def test_many_streams_get_fewer_messages(make_server: MakeServer) -> None:
    """All their tokens, in order."""

    def messages(streams: int) -> float:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70, 71, 72]), sampling_params=pb.SamplingParams(max_tokens=60))
        count = 0
        for stream in [stub.GenerateStream(request) for _ in range(streams)]:
            events = list(stream)
            assert [token for event in events for token in event.delta.token_ids] == [70, 71, 72] * 20
            count += kinds(events).count("delta")
        return count / streams / 60

    with make_server(seconds=0.004, max_num_seqs=64) as server, server.stub() as stub:
        assert messages(64) < 0.6
        server.wait_until_idle()
