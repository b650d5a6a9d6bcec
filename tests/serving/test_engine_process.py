"""An engine in a process of its own: the tokens are those of one in a thread, whatever ends it is told once, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from jengine import (
    AsyncLLM,
    EngineDead,
    EngineThread,
    InvalidArgument,
    ModelError,
    OutOfMemory,
    Request,
    RequestOutput,
    SamplingParams,
    Tokenizer,
)
from serving import engine_process
from serving.engine_process import EngineProcess
from serving.mock_engine import MockEngine
from tests.serving.leaks import alive, nothing_leaks, wait_until

MOCK = "serving.engines:mock_engine"
PROMPT = "The quick brown fox"
LONG = SamplingParams(max_tokens=None, ignore_eos=True)
WORK: list[tuple[Any, SamplingParams]] = [
    (PROMPT, SamplingParams(max_tokens=40)),
    ([5, 6, 7], SamplingParams(n=3, max_tokens=10, logprobs=2, prompt_logprobs=1)),
    ([5, 6, 7, 8], SamplingParams(max_tokens=10, stop_token_ids=[7], min_tokens=4)),
    (PROMPT, SamplingParams(max_tokens=40, stop="brown", logprobs=0)),
    ([9], SamplingParams(max_tokens=10**30)),
]
Start = Callable[..., AbstractContextManager[EngineProcess]]


@contextmanager
def started(engine: str = MOCK, **options: Any) -> Iterator[EngineProcess]:
    with nothing_leaks():
        process = EngineProcess(engine, options)
        try:
            process.start()
            yield process
        finally:
            process.quit()


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams, **options: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, **options)]


async def all_of(llm: AsyncLLM, work: list[tuple[Any, SamplingParams]]) -> list[RequestOutput]:
    got = await asyncio.gather(*[collect(llm, prompt, params, output_kind="final") for prompt, params in work])
    return [outputs[-1] for outputs in got]


def test_the_tokens_are_those_of_an_engine_in_a_thread(tokenizer: Tokenizer) -> None:
    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        async with llm:
            return await all_of(llm, WORK)

    options = {"max_model_len": 300, "max_num_seqs": 4, "pages": 40}
    expected = asyncio.run(main(AsyncLLM.over(EngineThread(MockEngine(**options)), tokenizer)))
    with started(**options) as process:
        got = asyncio.run(main(AsyncLLM.over(process, tokenizer)))
    assert [(o.outputs, o.prompt_logprobs) for o in got] == [(o.outputs, o.prompt_logprobs) for o in expected]
    assert {c.finish_reason for o in got for c in o.outputs} == {"stop", "length"}


def test_what_is_known_when_it_has_started(tokenizer_folder: Path) -> None:
    options = {"max_num_seqs": 4, "pages": 40}
    with started(**options, tokenizer_folder=str(tokenizer_folder)) as process:
        engine = MockEngine(**options)
        assert (process.limits, process.load) == (engine.limits, engine.load)
        assert process.facts.tokenizer_folder == str(tokenizer_folder)


def test_the_load_is_known_without_tokens(tokenizer: Tokenizer) -> None:
    """Of requests that wait, and after one was taken out."""

    async def main(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(collect(llm, PROMPT, LONG, request_id=str(i))) for i in range(5)]
        async with asyncio.timeout(10):
            while (llm.load.running, llm.load.waiting) != (4, 1):
                await asyncio.sleep(0.001)
            for i in range(5):
                await llm.abort(str(i))
            while llm.load != before:
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
        ("tests.serving.faulty_engines:refuses", {"error": "RuntimeError", "text": "on fire"}, "RuntimeError: on fire"),
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


def test_a_child_that_reads_nothing_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "QUIT_SECONDS", 0.1)
    monkeypatch.setattr(engine_process, "EXIT_SECONDS", 0.1)
    with started() as process:
        process.connect(lambda updates: None, lambda error: None)
        os.kill(process.pid or 0, signal.SIGSTOP)
        request = Request(request_id="large", prompt_token_ids=[1] * 10**6, params=LONG)
        process.add(request)  # more than the socket holds
        process.quit()


def test_a_process_may_end_without_closing(tokenizer_folder: Path) -> None:
    with parent(LEAVES, str(tokenizer_folder)) as server:
        child = int(server.stdout.read())  # type: ignore[union-attr]
        assert server.wait() == 0 and not alive(child)


def test_all_streams_of_a_killed_engine_end(tokenizer: Tokenizer) -> None:
    async def main(llm: AsyncLLM, pid: int) -> None:
        streams = [asyncio.create_task(collect(llm, PROMPT, LONG)) for _ in range(32)]
        while llm.load.running < 32:
            await asyncio.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            ends = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(end, EngineDead) and "signal 9" in str(end) for end in ends)
        with pytest.raises(EngineDead):
            await collect(llm, PROMPT, LONG)
        await llm.close()

    for _ in range(3):
        with started(seconds=0.001, max_model_len=100_000, pages=10**6) as process:
            asyncio.run(main(AsyncLLM.over(process, tokenizer), process.pid or 0))


@pytest.mark.parametrize(
    "engine, options, text",
    [
        (MOCK, {"fail_at": 7}, "FloatingPointError: the mock engine fails as it was told to"),
        ("tests.serving.faulty_engines:babbles", {}, "not understood"),
    ],
)
def test_an_engine_that_fails_tells_once(tokenizer: Tokenizer, engine: str, options: dict[str, Any], text: str) -> None:
    deaths: list[Any] = []

    class Counted(EngineProcess):
        def connect(self, deliver: Any, fail: Any) -> None:
            super().connect(deliver, lambda error: (deaths.append(error), fail(error)))

    async def main() -> None:
        llm = AsyncLLM.over(process, tokenizer)
        async with asyncio.timeout(10):
            ends = await asyncio.gather(*[collect(llm, PROMPT, LONG) for _ in range(32)], return_exceptions=True)
        assert all(isinstance(end, EngineDead) and text in str(end) for end in ends)
        await llm.close()

    with nothing_leaks():
        process = Counted(engine, options, deaths.append)
        process.start()
        asyncio.run(main())
    assert len(deaths) == 2 and deaths[0] is deaths[1]


def test_garbage_ends_the_child() -> None:
    deaths: list[BaseException] = []
    with started() as process:
        process.connect(lambda updates: None, deaths.append)
        process._child.send(bytearray(b"\xff" * 64))  # type: ignore[union-attr]
        wait_until(lambda: len(deaths) == 1)
        assert "exited with code 1" in str(deaths[0])


def test_signals_do_not_reach_the_child(tokenizer: Tokenizer) -> None:
    async def main(llm: AsyncLLM, pid: int) -> None:
        async with llm, aclosing(llm.generate(PROMPT, LONG)) as outputs:
            await anext(outputs)
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid, number)
            assert [output.finished async for output in outputs][-1]

    with started(seconds=0.001) as process:
        asyncio.run(main(AsyncLLM.over(process, tokenizer), process.pid or 0))


def test_a_mask_that_fails_in_the_child_ends_its_request_alone(tokenizer_folder: Path, tokenizer: Tokenizer) -> None:
    async def main(llm: AsyncLLM) -> None:
        async with llm, aclosing(llm.generate(PROMPT, LONG)) as outputs:
            await anext(outputs)
            [ended] = await collect(llm, PROMPT, SamplingParams(n=2, bad_words=["fox"]), output_kind="final")
            assert [(c.finish_reason, c.stop_reason, c.token_ids) for c in ended.outputs] == [("error", "the vocabulary is gone", [])] * 2
            assert [output.finished async for output in outputs][-1]

    with started("tests.serving.faulty_engines:cannot_mask", tokenizer_folder=str(tokenizer_folder), seconds=0.001) as process:
        asyncio.run(main(AsyncLLM.over(process, tokenizer)))


PARENT = """
import asyncio, signal, sys
from pathlib import Path
from jengine import AsyncLLM, SamplingParams, Tokenizer
from serving.engine_process import EngineProcess

async def main():
    process = EngineProcess("serving.engines:mock_engine", {"seconds": 0.005})
    process.start()
    llm = AsyncLLM.over(process, Tokenizer.load(Path(sys.argv[1])))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: asyncio.ensure_future(llm.close(drain=60)))
    outputs = llm.generate("The quick brown fox", SamplingParams(max_tokens=200))
    await anext(outputs)
    print(process.pid, flush=True)
    async for output in outputs:
        pass
    print(output.outputs[0].finish_reason, flush=True)
    await llm.close()

asyncio.run(main())
"""


LEAVES = PARENT.replace("    async for output", "    return\n    async for output")
STARTING = """
import sys
from serving.engine_process import EngineProcess

EngineProcess("tests.serving.faulty_engines:starts_slowly", {"mark": sys.argv[1]}).start()
"""


@contextmanager
def parent(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of a group of its own."""
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        yield process
        process.kill()


def test_an_interrupt_of_the_group_lets_the_server_drain(tokenizer_folder: Path) -> None:
    with parent(PARENT, str(tokenizer_folder)) as server:
        child = int(server.stdout.readline())  # type: ignore[union-attr]
        os.killpg(server.pid, signal.SIGINT)
        assert server.stdout.read().split()[-1] == "length"  # type: ignore[union-attr]
        assert server.wait() == 0 and not alive(child)


def test_the_child_of_a_killed_server_ends(tokenizer_folder: Path) -> None:
    with parent(PARENT, str(tokenizer_folder)) as server:
        child = int(server.stdout.readline())  # type: ignore[union-attr]
        server.kill()
        wait_until(lambda: not alive(child))


def test_the_child_of_a_killed_server_ends_while_it_starts(tmp_path: Path) -> None:
    mark = tmp_path / "begun"
    with parent(STARTING, str(mark)) as server:
        wait_until(lambda: mark.exists() and bool(mark.read_text()))
        child = int(mark.read_text())
        assert alive(child)
        server.kill()
        wait_until(lambda: not alive(child))
