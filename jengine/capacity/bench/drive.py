"""Sends requests when they are due, and records when their tokens arrive."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable

from jengine.base.errors import JengineError
from jengine.capacity.bench.endpoints import ServerUnderTest
from jengine.capacity.bench.result import ClientRecord
from jengine.capacity.bench.workload import BenchRequest

# if a server cannot be reached, rejects requests, or sends invalid responses
ERRORS = (JengineError, OSError, ValueError, KeyError)


async def drive(
    endpoint: ServerUnderTest,
    requests: list[BenchRequest],
    *,
    max_concurrency: int | None = None,
    done: Callable[[], object] = lambda: None,
) -> tuple[list[ClientRecord], float]:
    """Sends all requests. Returns the answers in the order of the requests, and the seconds to the last
    token.

    Args:
        max_concurrency: maximum number of concurrent requests; the others wait, which counts as part of their
            latency.
        done: called when a request ends.
    """
    places = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    gc.collect()
    gc.freeze()  # excludes prepared objects from garbage collection
    start = time.perf_counter()

    async def one(request: BenchRequest, answered: ClientRecord) -> None:
        async with places:
            if request.at is None:
                answered.due = time.perf_counter() - start
            try:
                async for tokens, prompt in endpoint.stream(request):
                    answered.prompt_tokens = max(answered.prompt_tokens, prompt)
                    if tokens:
                        answered.times.append(time.perf_counter() - start)
                        answered.tokens.append(tokens)
            except ERRORS as error:
                answered.error = f"{type(error).__name__}: {error}"
        if not answered.times and not answered.error:
            answered.error = "no token arrived"
        if not answered.prompt_tokens and not isinstance(request.prompt, str):
            answered.prompt_tokens = len(request.prompt)
        done()

    answers = [ClientRecord(request.at or 0.0) for request in requests]
    try:
        async with asyncio.TaskGroup() as group:
            for request, answered in zip(requests, answers, strict=True):
                if request.at is not None:
                    await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - start)))
                group.create_task(one(request, answered))
    finally:
        gc.unfreeze()
    last = max(
        [answered.times[-1] for answered in answers if answered.times], default=time.perf_counter() - start
    )
    return answers, last
