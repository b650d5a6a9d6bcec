"""Long text is processed in few threads, which no client can occupy completely, even by cancelling."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from jengine.serving.calls.errors import Busy, Refusal, refusal
from jengine.serving.requests.answers import PatientWriter
from jengine.serving.requests.service import LONG_TEXT, MAX_CLIENT_BYTES, THREADS, TextWork


class Jobs:
    """Work that lasts until it is released, in the order in which it started."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.release = threading.Semaphore(0)

    def job(self, name: str) -> Any:
        def work() -> str:
            self.begun.append(name)
            assert self.release.acquire(timeout=30)
            return name

        return work

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.begun) < count:
                await asyncio.sleep(0.001)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_short_text_is_worked_on_at_once() -> None:
    async def main() -> None:
        assert await TextWork().run("a", LONG_TEXT - 1, threading.get_ident) == threading.get_ident()
        assert await TextWork().run("a", LONG_TEXT, threading.get_ident) != threading.get_ident()

    run(main())


def test_clients_take_turns() -> None:
    async def main() -> None:
        work, jobs = TextWork(), Jobs()
        many = [asyncio.create_task(work.run("many", LONG_TEXT, jobs.job(f"many {i}"))) for i in range(5)]
        await jobs.wait_for(1)
        one = asyncio.create_task(work.run("one", LONG_TEXT, jobs.job("one")))
        await jobs.wait_for(2)
        assert jobs.begun == ["many 0", "one"]
        third = asyncio.create_task(work.run("third", LONG_TEXT, jobs.job("third")))
        await asyncio.sleep(0.05)
        assert len(jobs.begun) == THREADS, "no more at once"
        for _ in range(7):
            jobs.release.release()
        assert [await task for task in (*many, one, third)] == [
            *(f"many {i}" for i in range(5)),
            "one",
            "third",
        ]
        assert jobs.begun.index("third") < jobs.begun.index("many 3")
        assert not work._clients and not work._bytes

    run(main())


def test_a_clients_texts_without_bytes_take_turns_too() -> None:
    async def main() -> None:
        work, jobs = TextWork(waits=lambda: True), Jobs()
        tasks = [asyncio.create_task(work.run("a", 0, jobs.job(f"{i}"))) for i in range(3)]
        for i in range(3):
            await jobs.wait_for(i + 1)
            tasks.append(asyncio.create_task(work.run("a", 0, jobs.job("later"))))
            await asyncio.sleep(0)
            assert len(jobs.begun) == i + 1, "one at a time"
            jobs.release.release()
        for _ in range(3):
            jobs.release.release()
        await asyncio.gather(*tasks)
        assert not work._clients

    run(main())


def test_a_client_that_goes_keeps_its_turn_until_the_work_is_done() -> None:
    async def main() -> None:
        work, jobs = TextWork(), Jobs()
        running = asyncio.create_task(work.run("a", LONG_TEXT, jobs.job("running")))
        await jobs.wait_for(1)
        waiting = asyncio.create_task(work.run("a", LONG_TEXT, jobs.job("never")))
        await asyncio.sleep(0)
        for task in (running, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        later = asyncio.create_task(work.run("a", LONG_TEXT, jobs.job("later")))
        await asyncio.sleep(0.05)
        assert jobs.begun == ["running"], "its thread is busy still"
        jobs.release.release()
        jobs.release.release()
        assert await later == "later" and jobs.begun == ["running", "later"]
        assert not work._clients and not work._bytes

    run(main())


def test_too_much_text() -> None:
    async def main() -> None:
        work, jobs = TextWork(), Jobs()
        first = asyncio.create_task(work.run("a", MAX_CLIENT_BYTES, jobs.job("first")))
        await jobs.wait_for(1)
        with pytest.raises(Busy, match="bytes of this client's text") as busy:
            await work.run("a", LONG_TEXT, jobs.job("second"))
        assert busy.value.retry_seconds > 0
        other = asyncio.create_task(work.run("b", LONG_TEXT, jobs.job("other")))
        await jobs.wait_for(2)
        jobs.release.release()
        jobs.release.release()
        await asyncio.gather(first, other)

    run(main())


def test_statuses() -> None:
    full = refusal(Busy("full", 1.5, "text_work"))
    assert (full.code, full.message, full.cause, full.retry_seconds) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "full",
        "text_work",
        1.5,
    )


def test_a_message_that_is_not_read_in_time_ends_its_answer() -> None:
    async def main() -> None:
        abandoned: list[bool] = []
        context = SimpleNamespace(write=lambda message: asyncio.sleep(0.1), peer=lambda: "ipv4:127.0.0.1:1")
        answer = SimpleNamespace(abandon=lambda: abandoned.append(True))
        with pytest.raises(Refusal, match="not read within") as slow:
            await PatientWriter(context, 0.01, answer).write("x")  # type: ignore[arg-type]
        assert (slow.value.code, slow.value.cause, slow.value.retry_seconds) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "slow_reader",
            None,
        ), "not to be tried again"
        assert abandoned == [True]

    run(main())


def test_errors_are_the_callers() -> None:
    async def main() -> None:
        work = TextWork()
        with pytest.raises(ZeroDivisionError):
            await work.run("a", LONG_TEXT, lambda: 1 // 0)
        assert not work._clients

    run(main())
