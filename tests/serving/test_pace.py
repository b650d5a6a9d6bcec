"""Under load several tokens share a message, without delay at a stream's beginning or end."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from jengine import AsyncLLM, CompletionOutput, RequestOutput, SamplingParams, Tokenizer
from jengine.api.backend import EngineThread
from jengine.serving.metrics.server_metrics import Metrics
from jengine.serving.requests.answers import CORES_SHARE, LONGEST, LOOP_SHARE, MESSAGE_SECONDS, Answer, Pace
from jengine.serving.requests.tracking import TrackedRequest
from tests.mocks.mock_engine import MockEngine


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
        assert large.seconds == pytest.approx(MESSAGE_SECONDS / LOOP_SHARE), (
            "one event loop, however many cores"
        )


def test_outputs_gather_in_a_pause(tokenizer_folder: Path) -> None:
    """Until it is over; the last output does not wait."""

    async def run() -> None:
        engine = MockEngine(seconds=0.002, vocab_size=501, max_model_len=2**20, pages=2**18)
        llm = AsyncLLM.over(EngineThread(engine), Tokenizer.load(tokenizer_folder))
        clock = asyncio.get_running_loop().time
        async with llm, llm.submit([70, 71], SamplingParams(max_tokens=10**6), output_kind="delta") as handle:
            tokens = len((await anext(handle)).outputs[0].token_ids)
            due = clock() + 0.1
            handle.pause(due)
            second = await anext(handle)
            assert clock() >= due - 0.001 and not second.finished
            tokens += len(second.outputs[0].token_ids)
            assert tokens == len(handle.output.outputs[0].token_ids), "all that there is"
            handle.pause(due + 1000.0)
            asyncio.get_running_loop().call_later(0.05, handle.abort)
            last = await asyncio.wait_for(anext(handle), 60)
            assert last.finished and tokens + len(last.outputs[0].token_ids) == len(
                handle.output.outputs[0].token_ids
            )

    asyncio.run(run())


class Handle:
    """A request's handle, whose outputs are available immediately."""

    def __init__(self) -> None:
        self.output = RequestOutput(
            request_id="", prompt=None, prompt_token_ids=[1], outputs=[CompletionOutput(token_ids=[1])]
        )
        self.pauses: list[float] = []

    def pause(self, until: float) -> None:
        self.pauses.append(until)

    async def __anext__(self) -> RequestOutput:
        return self.output

    def close(self) -> None:
        pass


def test_streams_share_beats() -> None:
    """So that their messages are written together."""
    pace = Pace(cores=2)
    with pace.stream(), pace.stream():
        beat = pace.next_beat(100.0)
        assert beat == pytest.approx(100.0 + pace.seconds)
        assert pace.next_beat(100.0 + 0.9 * pace.seconds) == beat
        assert pace.next_beat(beat) == pytest.approx(beat + pace.seconds)
        assert pace.next_beat(200.0) == pytest.approx(200.0 + pace.seconds)


def test_each_output_of_a_stream_is_followed_by_a_pause() -> None:
    """Only streams pause; a request with one output does not count as a stream, and does not wait."""

    async def run() -> None:
        pace, first, second, whole = Pace(cores=2), Handle(), Handle(), Handle()

        def answer(handle: Handle, pace: Pace | None) -> Answer:
            return Answer(handle, TrackedRequest("m", "", Metrics()), pace)  # type: ignore[arg-type]

        began = asyncio.get_running_loop().time()
        with answer(whole, None) as final, answer(first, pace) as stream:
            await final.next()
            await stream.next()
            with answer(second, pace) as other:
                await stream.next()
                await other.next()
            await stream.next()
        assert len(first.pauses) == 3 and len(second.pauses) == 1
        assert first.pauses == sorted(first.pauses) and first.pauses[0] > began
        assert not whole.pauses and pace.seconds == 0

    asyncio.run(run())
