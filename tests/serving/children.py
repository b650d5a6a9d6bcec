"""Engine processes for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jengine import (
    AsyncLLM,
    RequestOutput,
    SamplingParams,
)
from jengine.serving.processes.engine_process import EngineProcess
from tests.serving.leaks import nothing_leaks

MOCK = "tests.mocks.mock_engine:mock_engine"
PROMPT = "The quick brown fox"
LONG = SamplingParams(max_tokens=None, ignore_eos=True)


@contextmanager
def started(engine: str = MOCK, **options: Any) -> Iterator[EngineProcess]:
    with nothing_leaks():
        process = EngineProcess(engine, options)
        try:
            process.start()
            yield process
        finally:
            process.quit()


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams, **options: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, **options)]
