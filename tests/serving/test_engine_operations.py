"""Operations over an engine in a thread and in a process: each ends once, with its answer, its error, or the
engine's end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jengine import AsyncLLM, EngineDead, InvalidArgument, JengineError, Tokenizer
from jengine.api.backend import EngineThread
from jengine.serving.processes.wire import MAX_FRAME
from tests.mocks.mock_engine import MockEngine
from tests.serving.children import LONG, PROMPT, started
from tests.serving.odd_operations import Add, AnswerOddly, Count, Fail, WaitForFile

ENGINE = "tests.serving.odd_operations:engine"
LARGE: dict[str, Any] = {"seconds": 0.001, "max_model_len": 100_000, "pages": 10**6}
Test = Callable[[AsyncLLM], Any]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@contextmanager
def backend(kind: str, **options: Any) -> Iterator[Any]:
    if kind == "thread":
        yield EngineThread(MockEngine(**options))
    else:
        with started(ENGINE, **options) as process:
            yield process


def with_llm(
    tokenizer: Tokenizer, kind: str, test: Callable[..., Any], *arguments: Any, **options: Any
) -> None:
    async def main(engine: Any) -> None:
        llm = AsyncLLM.over(engine, tokenizer)
        async with asyncio.timeout(60):
            await test(llm, *arguments)
            await llm.close()
        assert not llm._requests._pending

    with backend(kind, **options) as engine:
        asyncio.run(main(engine))


BOTH = pytest.mark.parametrize("kind", ["thread", "process"])


@BOTH
def test_an_error_is_that_operations_alone(tokenizer: Tokenizer, kind: str) -> None:
    """The engine goes on, with its requests and with other operations."""

    async def uses(llm: AsyncLLM) -> None:
        async with llm.submit(PROMPT, LONG) as handle:
            await anext(handle)
            work = [
                llm.do(one)
                for one in (Fail("ZeroDivisionError"), Fail("InvalidArgument"), Add(1.5, 2.0), AnswerOddly())
            ]
            odd, refused, added, unsendable = await asyncio.gather(*work, return_exceptions=True)
            assert type(odd) is (
                ZeroDivisionError if kind == "thread" else JengineError
            ) and "by nothing" in str(odd)
            assert isinstance(refused, InvalidArgument) and (refused.field, refused.value) == (
                "kind",
                "InvalidArgument",
            )
            assert added == [1.5, 2.0, 3.5]
            assert kind == "thread" or (type(unsendable) is JengineError and "object" in str(unsendable))
            assert not (await anext(handle)).finished
        assert [await llm.do(Count()) for _ in range(3)] == [1, 2, 3]

    with_llm(tokenizer, kind, uses, **LARGE)


def test_a_message_too_large_is_that_operations_error(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either direction."""

    async def uses(llm: AsyncLLM) -> None:
        with pytest.raises(JengineError, match="at most"):
            await llm.do(AnswerOddly(MAX_FRAME))
        monkeypatch.setattr("jengine.serving.processes.wire.MAX_FRAME", 1000)
        with pytest.raises(JengineError, match="at most 1000"):
            await llm.do(Fail("x" * 2000))
        assert not llm.backend._open and await llm.do(Add(1, 1)) == [1, 1, 2]  # type: ignore[attr-defined]

    with_llm(tokenizer, "process", uses)


@BOTH
def test_a_long_operation_holds_nothing_up(tokenizer: Tokenizer, kind: str, tmp_path: Path) -> None:
    """Answers may come in another order than their operations."""

    async def uses(llm: AsyncLLM) -> None:
        file = tmp_path / "text"
        long = asyncio.create_task(llm.do(WaitForFile(str(file))))
        async with llm.submit(PROMPT, LONG) as handle:
            for _ in range(3):
                await anext(handle)
            assert await llm.do(Add(2, 3)) == [2, 3, 5] and not long.done()
            (tmp_path / "new").write_text("there")
            (tmp_path / "new").rename(file)
            assert await long == "there" and not handle.finished

    with_llm(tokenizer, kind, uses, **LARGE)


@BOTH
def test_an_answer_for_a_cancelled_caller_is_dropped(tokenizer: Tokenizer, kind: str) -> None:
    async def uses(llm: AsyncLLM) -> None:
        left = asyncio.create_task(llm.do(Count()))
        await asyncio.sleep(0)
        left.cancel()
        assert await llm.do(Count()) == 2 and not llm._requests._pending

    with_llm(tokenizer, kind, uses)


@BOTH
def test_operations_in_flight_when_it_is_closed_end_once(
    tokenizer: Tokenizer, kind: str, tmp_path: Path
) -> None:
    """Those between steps may still be answered; a long one is not awaited."""
    ends: list[tuple[Any, Any]] = []

    async def uses(llm: AsyncLLM) -> None:
        llm.backend.do(Count(), lambda *answer: ends.append(answer))
        long = asyncio.create_task(llm.do(WaitForFile(str(tmp_path / "text"))))
        short = [asyncio.create_task(llm.do(Count())) for _ in range(20)]
        await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(EngineDead, match="closed"):
            await long
        ended = await asyncio.gather(*short, return_exceptions=True)
        assert ended == list(range(2, 22)) or all(isinstance(end, int | EngineDead) for end in ended)
        (tmp_path / "text").write_text("too late")  # ends the thread of an engine in this process
        with pytest.raises(EngineDead, match="closed"):
            await llm.do(Count())

    with_llm(tokenizer, kind, uses)
    assert ends in ([(1, None)], [])


def test_operations_of_an_engine_that_fails_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    step = threading.Event()

    class Failing(MockEngine):
        def step(self) -> Any:
            step.wait(30)
            raise FloatingPointError("on fire")

    async def main() -> None:
        llm = AsyncLLM.over(EngineThread(Failing()), tokenizer)
        handle = llm.submit(PROMPT, LONG)
        while not llm.load.waiting:
            await asyncio.sleep(0.001)
        tasks = [
            asyncio.create_task(llm.do(one))
            for one in (Count(), Add(1, 2), WaitForFile(str(tmp_path / "text")))
        ]
        await asyncio.sleep(0.01)
        step.set()
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert all(isinstance(end, EngineDead) and "on fire" in str(end) for end in ended)
        (tmp_path / "text").touch()
        handle.close()
        await llm.close()

    asyncio.run(main())


def test_operations_of_a_process_that_is_killed_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def uses(llm: AsyncLLM, kill: Callable[[], None]) -> None:
        llm.submit(PROMPT, LONG)
        while not llm.load.waiting and not llm.load.running:
            await asyncio.sleep(0.001)
        tasks = [
            asyncio.create_task(llm.do(one))
            for one in (Count(), Add(1, 2), WaitForFile(str(tmp_path / "text")))
        ]
        await asyncio.sleep(0.05)
        kill()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, EngineDead) and "signal 9" in str(end) for end in ended)
        with pytest.raises(EngineDead, match="signal 9"):
            await llm.do(Count())

    async def main(process: Any) -> None:
        llm = AsyncLLM.over(process, tokenizer)
        async with asyncio.timeout(60):
            await uses(llm, lambda: os.kill(process.pid, signal.SIGKILL))
            await llm.close()

    with started(ENGINE, seconds=3600) as process:
        asyncio.run(main(process))


def test_a_strategy_may_be_set_in_any_thread(tokenizer: Tokenizer) -> None:
    async def uses(llm: AsyncLLM) -> None:
        await asyncio.to_thread(llm.set_strategy, "memory")
        with pytest.raises(InvalidArgument, match="strategy='speed': must be one of"):
            await asyncio.to_thread(llm.set_strategy, "speed")
        await llm.do(Count())
        while llm.load.strategy != "memory":
            await asyncio.sleep(0.001)

    with_llm(tokenizer, "process", uses)
    with_llm(tokenizer, "thread", uses)
