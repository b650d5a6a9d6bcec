"""An engine process that dies, fails or sends garbage, and one whose server does: no caller waits, and
nothing is leaked.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from jengine import AsyncLLM, EngineDead, InvalidArgument, SamplingParams, Tokenizer
from jengine.serving.processes.engine_process import EngineProcess
from jengine.spi import Request
from tests.serving.children import LONG, MOCK, PROMPT, collect, started
from tests.serving.leaks import alive, nothing_leaks, wait_until


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


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
        (MOCK, {"fail_at": 7}, "FloatingPointError: the mock engine fails as requested"),
        ("tests.serving.faulty_engines:babbles", {}, "sent an invalid message"),
    ],
)
def test_an_engine_that_fails_tells_once(
    tokenizer: Tokenizer, engine: str, options: dict[str, Any], text: str
) -> None:
    deaths: list[Any] = []

    class Counted(EngineProcess):
        def connect(self, deliver: Any, fail: Any) -> None:
            super().connect(deliver, lambda error: (deaths.append(error), fail(error)))

    async def main() -> None:
        llm = AsyncLLM.over(process, tokenizer)
        async with asyncio.timeout(10):
            ends = await asyncio.gather(
                *[collect(llm, PROMPT, LONG) for _ in range(32)], return_exceptions=True
            )
        assert all(isinstance(end, EngineDead) and text in str(end) for end in ends)
        await llm.close()

    with nothing_leaks():
        process = Counted(engine, options, deaths.append)
        process.start()
        asyncio.run(main())
    assert len(deaths) == 2 and deaths[0] is deaths[1]


def test_it_may_die_with_orders_unread() -> None:
    deaths: list[BaseException] = []
    with started() as process:
        process.connect(lambda updates: None, deaths.append)
        os.kill(process.pid or 0, signal.SIGSTOP)
        process.add(Request(request_id="one", prompt_token_ids=[1], params=LONG))
        wait_until(process._outbox.empty)
        os.kill(process.pid or 0, signal.SIGKILL)
        wait_until(lambda: len(deaths) == 1)
        assert "signal 9" in str(deaths[0])


def test_garbage_ends_the_child() -> None:
    deaths: list[BaseException] = []
    with started() as process:
        process.connect(lambda updates: None, deaths.append)
        process._child.send(bytearray(b"\xff" * 64))  # type: ignore[union-attr]
        wait_until(lambda: len(deaths) == 1)
        assert "exited with code 1" in str(deaths[0])


def test_signals_do_not_reach_the_child(tokenizer: Tokenizer) -> None:
    async def main(llm: AsyncLLM, pid: int) -> None:
        assert os.getpgid(pid) != os.getpgid(0), "a terminal's Ctrl-C would reach it before it ignores that"
        async with llm, aclosing(llm.generate(PROMPT, LONG)) as outputs:
            await anext(outputs)
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid, number)
            assert [output.finished async for output in outputs][-1]

    with started(seconds=0.001) as process:
        asyncio.run(main(AsyncLLM.over(process, tokenizer), process.pid or 0))


def test_a_mask_that_fails_in_the_child_ends_its_request_alone(
    tokenizer_folder: Path, tokenizer: Tokenizer
) -> None:
    async def main(llm: AsyncLLM) -> None:
        async with llm, aclosing(llm.generate(PROMPT, LONG)) as outputs:
            await anext(outputs)
            [ended] = await collect(llm, PROMPT, SamplingParams(n=2, bad_words=["fox"]), output_kind="final")
            assert [(c.finish_reason, c.stop_reason, c.token_ids) for c in ended.outputs] == [
                ("error", "the vocabulary is gone", [])
            ] * 2
            assert [output.finished async for output in outputs][-1]

    with started(
        "tests.serving.faulty_engines:cannot_mask", tokenizer_folder=str(tokenizer_folder), seconds=0.001
    ) as process:
        asyncio.run(main(AsyncLLM.over(process, tokenizer)))


PARENT = """
import asyncio, signal, sys
from pathlib import Path
from jengine import AsyncLLM, SamplingParams, Tokenizer
from jengine.serving.processes.engine_process import EngineProcess

async def main():
    process = EngineProcess("tests.mocks.mock_engine:mock_engine", {"seconds": 0.005})
    process.start()
    llm = AsyncLLM.over(process, Tokenizer.load(Path(sys.argv[1])))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: asyncio.ensure_future(llm.close(drain=60)))
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
from jengine.serving.processes.engine_process import EngineProcess

EngineProcess("tests.serving.faulty_engines:starts_slowly", {"mark": sys.argv[1]}).start()
"""


@contextmanager
def parent(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a separate process group."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
        "env": environment,
    }
    with subprocess.Popen([sys.executable, "-c", script, *arguments], **options) as process:
        yield process
        process.kill()


def test_a_process_may_end_without_closing(tokenizer_folder: Path) -> None:
    with parent(LEAVES, str(tokenizer_folder)) as server:
        child = int(server.stdout.read())  # type: ignore[union-attr]
        assert server.wait() == 0 and not alive(child)


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


def test_a_request_larger_than_a_frame_is_rejected(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not sent to the engine, which continues."""

    async def main() -> None:
        async with AsyncLLM.over(process, tokenizer) as llm:
            for _ in range(3):
                with pytest.raises(InvalidArgument, match=r"prompt='\d+ bytes': at most 3000 bytes"):
                    llm.submit(
                        [7] * 1000, SamplingParams(allowed_token_ids=list(range(1000))), request_id="mine"
                    )
                [*_, last] = await collect(llm, [7], SamplingParams(max_tokens=2), request_id="mine")
                assert last.outputs[0].token_ids == [7, 7] and alive(process.pid or 0)

    with started() as process:
        monkeypatch.setattr("jengine.serving.processes.wire.MAX_FRAME", 3000)
        asyncio.run(main())


def test_a_request_that_an_engine_stumbles_over_ends_alone(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with AsyncLLM.over(process, tokenizer) as llm, llm.submit([7], LONG) as other:
            for _ in range(3):
                [*_, last] = await collect(llm, [13, 7], SamplingParams(n=3))
                assert {part.finish_reason for part in last.outputs} == {"error"} and "too odd" in str(
                    last.outputs[0].stop_reason
                )
            assert len((await anext(other)).outputs[0].token_ids) >= 1 and not other.finished
            while llm.load.running > 1:
                await asyncio.sleep(0.001)
            assert llm.load.waiting == 0 and alive(process.pid or 0)

    with started(
        "tests.serving.faulty_engines:picky", seconds=0.001, max_model_len=100_000, pages=10**6
    ) as process:
        asyncio.run(main())
