"""The end of an AsyncLLM: by an error, `close`, the end of its event loop or of the process. No caller waits
forever.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest

from jengine import EngineDead, JengineError, SamplingParams
from jengine.api import backend as backend_module
from jengine.api.backend import EngineThread
from jengine.core.updates import Update
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import Operation
from jengine.text.tokenizer import Tokenizer
from tests.engine.counting import LONG, TEXT, CountingRunner, assert_idle, collect, counting
from tests.mocks.mock_engine import MockEngine
from tests.text.conftest import byte_level


@pytest.mark.parametrize("fail_at", [0, 30])
def test_an_error_in_the_engine_reaches_everybody(fail_at: int) -> None:
    async def main() -> None:
        llm = counting(CountingRunner(0.001, fail_at))
        async with asyncio.timeout(10):
            answers = await asyncio.gather(
                *[collect(llm, TEXT, LONG) for _ in range(20)], return_exceptions=True
            )
            for answer in answers:  # 8 run and 12 wait
                assert (
                    isinstance(answer, EngineDead)
                    and "on fire" in str(answer)
                    and isinstance(answer.__cause__, FloatingPointError)
                )
            with pytest.raises(EngineDead, match="on fire"):
                await collect(llm, TEXT)
            assert not llm._requests._handles
            await llm.close(drain=60)

    asyncio.run(main())


def test_an_error_in_making_text_reaches_everybody() -> None:
    class Broken(Tokenizer):
        def _bytes_of(self, token_id: int) -> bytes:
            if token_id == 120:
                raise KeyError(token_id)
            return super()._bytes_of(token_id)

    async def main() -> None:
        llm = counting(CountingRunner(0.001), Broken(byte_level()))
        async with asyncio.timeout(10):
            answers = await asyncio.gather(
                *[collect(llm, TEXT, LONG) for _ in range(20)], return_exceptions=True
            )
            assert all(isinstance(answer, EngineDead) and "120" in str(answer) for answer in answers), answers
            await llm.close()
        assert not llm.backend._thread.is_alive()

    asyncio.run(main())


@pytest.mark.parametrize("drain, reason", [(0.0, "abort"), (30.0, "length"), (0.05, "abort")])
def test_close_while_requests_run(drain: float, reason: str) -> None:
    async def main() -> None:
        llm = counting(CountingRunner(0.003))
        tasks = [asyncio.create_task(collect(llm, TEXT, LONG)) for _ in range(12)]
        while llm.backend.engine.scheduler.registry.num_running < 8:
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(llm.close(drain))
        await asyncio.sleep(0)
        with pytest.raises(EngineDead, match="closed"):
            await collect(llm, TEXT)
        await closing
        for outputs in await asyncio.gather(*tasks):
            end = outputs[-1].outputs[0]
            assert (end.finish_reason, end.stop_reason) == (reason, "shutdown" if reason == "abort" else None)
        await llm.close()
        assert_idle(llm)

    asyncio.run(main())


def test_programs_that_arrive_run_when_the_engine_is_idle_but_not_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Arriving(MockEngine):
        looks = 0

        @property
        def has_unused_programs(self) -> bool:
            self.looks += 1
            return self.looks > 1

        def step(self) -> list[Update]:
            backend.quit(wait=False)
            return super().step()

    monkeypatch.setattr(backend_module, "IDLE_SECONDS", 0.01)
    backend = EngineThread(Arriving())
    backend.connect(lambda updates: None, lambda error: None)
    assert backend._thread is not None
    backend._thread.join(30)
    assert not backend._thread.is_alive() and backend.engine.steps == 1  # type: ignore[attr-defined]


def test_shutdown_ends_requests_and_operations() -> None:
    class Endless(Operation[None], frozen=True):
        in_thread = True

        def run(self, engine: Engine) -> None:
            ended.wait()

    async def main() -> None:
        llm = counting(CountingRunner(0.003))
        tasks = [asyncio.create_task(collect(llm, TEXT, LONG)) for _ in range(12)] + [
            asyncio.create_task(llm.do(Endless()))
        ]
        while llm.backend.engine.scheduler.registry.num_running < 8:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(llm.shutdown)
        async with asyncio.timeout(30):
            for end in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(end, EngineDead) and "shut down" in str(end)
        with pytest.raises(EngineDead, match="shut down"):
            await collect(llm, TEXT)
        assert not llm._requests._pending and not llm._requests._handles

    ended = threading.Event()
    asyncio.run(main())
    ended.set()


def test_the_drain_does_not_wait_for_slow_readers_and_can_be_cut_short() -> None:
    async def main() -> None:
        llm = counting(CountingRunner())
        reader = llm.generate(TEXT, LONG)
        await anext(reader)
        # all is generated; that it has not been read is no reason to wait
        await asyncio.wait_for(llm.close(drain=60), 10)
        assert [output.outputs[0].finish_reason async for output in reader] == ["length"]
        llm = counting(CountingRunner(0.05))
        reading = asyncio.create_task(collect(llm, TEXT, LONG))
        slow = asyncio.create_task(llm.close(drain=60))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(asyncio.gather(llm.close(), slow), 10)
        assert (await reading)[-1].outputs[0].stop_reason == "shutdown"

    asyncio.run(main())


def test_one_event_loop_at_a_time() -> None:
    llm = counting(CountingRunner(0.001))
    for _ in range(2):
        outputs = asyncio.run(collect(llm, TEXT, SamplingParams(max_tokens=5)))
        assert outputs[-1].outputs[0].finish_reason == "length"

    abandoned = asyncio.new_event_loop()  # closed with a request unfinished: nobody ever ends its iteration
    reader = llm.generate(TEXT, LONG, request_id="mine")
    abandoned.run_until_complete(anext(reader))
    refused: list[Exception] = []

    def elsewhere() -> None:
        try:
            asyncio.run(collect(llm, TEXT))
        except JengineError as error:
            refused.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(refused) == 1 and "another event loop" in str(refused[0])
    abandoned.close()
    outputs = asyncio.run(collect(llm, TEXT, SamplingParams(max_tokens=5), request_id="mine"))
    assert outputs[-1].outputs[0].finish_reason == "length"
    asyncio.run(llm.close())
    assert_idle(llm)


def test_an_engine_ends_with_its_llm() -> None:
    """`del`, or another value of its name, as when a notebook's cell runs again."""

    async def main() -> None:
        llm = counting(CountingRunner(0.001))
        thread, engine = llm.backend._thread, weakref.ref(llm.backend.engine)
        handle = llm.submit(TEXT, LONG)
        del llm
        gc.collect()
        outputs = [output async for output in handle]  # it has kept its AsyncLLM
        assert outputs[-1].outputs[0].finish_reason == "length"
        del handle
        gc.collect()
        await asyncio.to_thread(thread.join)
        for quitting in threading.enumerate():
            if quitting.name == "quit":
                await asyncio.to_thread(quitting.join)
        gc.collect()
        assert engine() is None

    asyncio.run(main())


LEAVES = """
import asyncio
from tests.engine.counting import LONG, CountingRunner, counting

llm = counting(CountingRunner(0.5))
loop = asyncio.new_event_loop()  # never closed: closing it would abort the request
reader = llm.generate("x", LONG)
loop.run_until_complete(anext(reader))
assert llm.backend.engine.has_work and llm.backend._thread.is_alive()
"""


def test_a_process_may_end_without_closing() -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
