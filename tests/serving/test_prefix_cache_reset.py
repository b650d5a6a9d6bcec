"""AsyncLLM.reset_prefix_cache over both kinds of engines: it completes, or raises EngineDead when the engine
ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from jengine import AsyncLLM, EngineDead, SamplingParams, Tokenizer
from jengine.api.backend import EngineThread
from jengine.serving.processes import engine_process
from tests.mocks.mock_engine import MockEngine
from tests.serving.children import LONG, started

IDS = list(range(1, 50))  # three pages of the mock's, and a token


def with_llm(folder: Path, backend: Any, test: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        llm = AsyncLLM.over(backend, Tokenizer.load(folder))
        async with asyncio.timeout(30):
            await test(llm)
        await llm.close()

    asyncio.run(main())


async def ask(llm: AsyncLLM, salt: str | None = None) -> int | None:
    prompt: Any = {"prompt_token_ids": IDS, "cache_salt": salt}
    return [output async for output in llm.generate(prompt, SamplingParams(max_tokens=2))][
        -1
    ].num_cached_tokens


async def uses(llm: AsyncLLM) -> None:
    assert [await ask(llm), await ask(llm), await ask(llm, "s"), await ask(llm, "s")] == [0, 48, 0, 48]
    assert await llm.reset_prefix_cache() is True
    assert [await ask(llm), await ask(llm, "s")] == [0, 0]
    many = await asyncio.gather(*[llm.reset_prefix_cache() for _ in range(20)], ask(llm))
    assert many[:-1] == [True] * 20 and not llm._requests._pending
    left = asyncio.ensure_future(llm.reset_prefix_cache())
    await asyncio.sleep(0)
    left.cancel()
    assert await llm.reset_prefix_cache() and not llm._requests._pending
    await llm.close()
    with pytest.raises(EngineDead, match="closed"):
        await llm.reset_prefix_cache()


def test_an_engine_in_a_thread(tokenizer_folder: Path) -> None:
    with_llm(tokenizer_folder, EngineThread(MockEngine()), uses)


def test_an_engine_in_a_process(tokenizer_folder: Path) -> None:
    with started() as process:
        with_llm(tokenizer_folder, process, uses)
        assert not process._open


def test_a_reset_does_not_wait_for_an_engine_that_fails(tokenizer_folder: Path) -> None:
    asked = threading.Event()

    class Failing(MockEngine):
        def step(self) -> Any:
            asked.wait(30)
            raise FloatingPointError("on fire")

    async def fails(llm: AsyncLLM) -> None:
        request = asyncio.create_task(ask(llm))
        while not llm.load.waiting:
            await asyncio.sleep(0.001)
        reset = asyncio.create_task(llm.reset_prefix_cache())
        await asyncio.sleep(0.01)
        asked.set()
        for task in (reset, request):
            with pytest.raises(EngineDead, match="on fire"):
                await task

    with_llm(tokenizer_folder, EngineThread(Failing()), fails)


def test_nor_for_a_process_that_is_killed_or_closed(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "QUIT_SECONDS", 0.2)

    async def waits(llm: AsyncLLM) -> asyncio.Task[bool]:
        handle = llm.submit(IDS, LONG)
        while not llm.load.waiting and not llm.load.running:
            await asyncio.sleep(0.001)
        task = asyncio.create_task(llm.reset_prefix_cache())
        await asyncio.sleep(0.01)
        assert not task.done() and handle is not None, "it is in a step"
        return task

    async def killed(llm: AsyncLLM) -> None:
        task = await waits(llm)
        os.kill(process.pid or 0, signal.SIGKILL)
        with pytest.raises(EngineDead, match="signal 9"):
            await task

    async def closed(llm: AsyncLLM) -> None:
        task = await waits(llm)
        closing = asyncio.create_task(llm.close())
        with pytest.raises(EngineDead, match="has been closed"):
            await task
        await closing

    for end in (killed, closed):
        with started(seconds=3600) as process:
            with_llm(tokenizer_folder, process, end)
