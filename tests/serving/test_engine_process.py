"""An engine in a separate process: its tokens equal those of one in a thread, and starting and quitting leak
nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from jengine import (
    AsyncLLM,
    EmbeddingRequestOutput,
    EngineDead,
    InvalidArgument,
    ModelError,
    OutOfMemory,
    RequestOutput,
    SamplingParams,
    Tokenizer,
)
from jengine.api.backend import EngineThread
from jengine.serving.processes import engine_process
from jengine.serving.processes.engine_process import EngineProcess
from jengine.spi import Request
from tests.mocks.mock_engine import MockEngine
from tests.serving.children import LONG, MOCK, PROMPT, collect, started
from tests.serving.leaks import alive, nothing_leaks, wait_until

WORK: list[tuple[Any, SamplingParams]] = [
    (PROMPT, SamplingParams(max_tokens=40)),
    ([5, 6, 7], SamplingParams(n=3, max_tokens=10, logprobs=2, prompt_logprobs=1)),
    ([5, 6, 7, 8], SamplingParams(max_tokens=10, stop_token_ids=[7], min_tokens=4)),
    (PROMPT, SamplingParams(max_tokens=40, stop="brown", logprobs=0)),
    ([9], SamplingParams(max_tokens=10**30)),
]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


async def all_of(llm: AsyncLLM, work: list[tuple[Any, SamplingParams]]) -> list[RequestOutput]:
    got = await asyncio.gather(
        *[collect(llm, prompt, params, output_kind="final") for prompt, params in work]
    )
    return [outputs[-1] for outputs in got]


def test_the_tokens_are_those_of_an_engine_in_a_thread(tokenizer: Tokenizer) -> None:
    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        async with llm:
            return await all_of(llm, WORK)

    options = {"max_model_len": 300, "max_num_seqs": 4, "pages": 40}
    expected = asyncio.run(main(AsyncLLM.over(EngineThread(MockEngine(**options)), tokenizer)))
    with started(**options) as process:
        got = asyncio.run(main(AsyncLLM.over(process, tokenizer)))
    assert [o.outputs for o in got] == [o.outputs for o in expected]
    scores = ([o.prompt_logprobs and [*o.prompt_logprobs] for o in each] for each in (got, expected))
    assert next(scores) == next(scores)
    assert {c.finish_reason for o in got for c in o.outputs} == {"stop", "length"}


def test_embeddings_are_those_of_an_engine_in_a_thread(tokenizer: Tokenizer) -> None:
    async def main(llm: AsyncLLM) -> list[EmbeddingRequestOutput]:
        async with llm:
            return await asyncio.gather(
                llm.embed(PROMPT), llm.embed([5, 6, 7], pooling="mean", normalize=False, dimensions=6)
            )

    expected = asyncio.run(main(AsyncLLM.over(EngineThread(MockEngine(embedding_size=8)), tokenizer)))
    with started(embedding_size=8) as process:
        got = asyncio.run(main(AsyncLLM.over(process, tokenizer)))
    assert [(o.outputs, o.prompt_token_ids) for o in got] == [
        (o.outputs, o.prompt_token_ids) for o in expected
    ]
    assert got[1].outputs.embedding == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_what_is_known_when_it_has_started(tokenizer_folder: Path) -> None:
    options = {"max_num_seqs": 4, "pages": 40}
    with started(**options, tokenizer_folder=str(tokenizer_folder)) as process:
        engine = MockEngine(**options)
        assert (process.limits, process.load) == (engine.limits, engine.load)
        assert process.info.tokenizer_folder == str(tokenizer_folder)


def test_the_load_is_known_without_tokens(tokenizer: Tokenizer) -> None:
    """The load includes waiting requests, and changes when one is removed."""

    async def main(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(collect(llm, PROMPT, LONG, request_id=str(i))) for i in range(5)]
        async with asyncio.timeout(10):
            while (llm.load.running, llm.load.waiting) != (4, 1):
                await asyncio.sleep(0.001)
            for i in range(5):
                await llm.abort(str(i))
            while llm.load[:4] != before[:4]:
                await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        await llm.close()

    with started(max_num_seqs=4, seconds=0.001, max_model_len=100_000, pages=100_000) as process:
        before = process.load
        asyncio.run(main(AsyncLLM.over(process, tokenizer)))


@pytest.mark.parametrize("kind", [InvalidArgument, ModelError, OutOfMemory])
def test_errors_of_the_start_are_what_they_were(kind: type[Exception]) -> None:
    with (
        pytest.raises(kind, match="weights are missing") as caught,
        started("tests.serving.faulty_engines:refuses", error=kind.__name__, text="weights are missing"),
    ):
        pass
    assert type(caught.value) is kind
    if isinstance(caught.value, InvalidArgument):
        assert (caught.value.field, caught.value.value) == ("max_model_len", 10**30)


@pytest.mark.parametrize(
    "engine, options, text",
    [
        (
            "tests.serving.faulty_engines:refuses",
            {"error": "RuntimeError", "text": "on fire"},
            "RuntimeError: on fire",
        ),
        ("tests.serving.faulty_engines:exits", {"code": 3}, "exited with code 3"),
        ("tests.serving.nowhere:nothing", {}, "ModuleNotFoundError"),
    ],
)
def test_any_other_end_of_the_start_is_told(engine: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(EngineDead, match=text), started(engine, **options):
        pass


@pytest.mark.parametrize("connected", [False, True])
def test_quit_may_come_again(connected: bool) -> None:
    with started() as process:
        if connected:
            process.connect(lambda updates: None, lambda error: pytest.fail(str(error)))
        process.quit(wait=False)
        process.quit()
        process.quit()
        assert not alive(process.pid or 0)
    EngineProcess(MOCK, {}).quit()


def test_quit_ends_a_start(tmp_path: Path) -> None:
    mark = tmp_path / "begun"
    errors: list[Exception] = []

    def start() -> None:
        try:
            process.start()
        except EngineDead as error:
            errors.append(error)

    with nothing_leaks():
        process = EngineProcess("tests.serving.faulty_engines:starts_slowly", {"mark": mark})
        thread = threading.Thread(target=start)
        thread.start()
        wait_until(mark.exists)
        process.quit()
        thread.join()
        assert "signal 9" in str(errors[0])
        with pytest.raises(EngineDead, match="told to quit"):
            process.start()


def test_quit_is_heard_until_the_start_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(engine_process._Child):
        def messages(self) -> Any:
            for messages in super().messages():
                process.quit(wait=False)
                yield messages

    monkeypatch.setattr(engine_process, "_Child", Late)
    with nothing_leaks():
        process = EngineProcess(MOCK, {})
        with pytest.raises(EngineDead):
            process.start()
        process.quit()


def test_a_child_that_does_not_quit_is_killed(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "QUIT_SECONDS", 0.2)

    async def main(llm: AsyncLLM) -> None:
        async with aclosing(llm.generate(PROMPT, LONG)) as outputs:
            first = asyncio.ensure_future(anext(outputs))
            while llm.load.waiting == 0:
                await asyncio.sleep(0.001)
            await llm.close()
            assert (await first).outputs[0].stop_reason == "shutdown"

    with started(seconds=3600) as process:  # a step
        asyncio.run(main(AsyncLLM.over(process, tokenizer)))


def test_it_is_killed_without_anybody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "QUIT_SECONDS", 0.1)
    with nothing_leaks():
        ends: list[EngineDead | None] = []
        process = EngineProcess(MOCK, {"seconds": 3600}, ends.append)
        process.start()
        process.connect(lambda updates: None, lambda error: pytest.fail(str(error)))
        process.add(Request(request_id="one", prompt_token_ids=[1], params=LONG))
        wait_until(lambda: process.load.waiting == 1)
        process.quit(wait=False)
        wait_until(lambda: ends == [None])


def test_a_child_that_reads_nothing_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "QUIT_SECONDS", 0.1)
    monkeypatch.setattr(engine_process, "EXIT_SECONDS", 0.1)
    with started() as process:
        process.connect(lambda updates: None, lambda error: None)
        os.kill(process.pid or 0, signal.SIGSTOP)
        request = Request(request_id="large", prompt_token_ids=[1] * 10**6, params=LONG)
        process.add(request)  # more than the socket holds
        process.quit()
