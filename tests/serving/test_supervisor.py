"""Engines die and are replaced; effects on callers, health and the process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from jengine import EngineDead, InvalidArgument, Load, RequestOutput, SamplingParams
from jengine.serving.processes.engine_process import EngineProcess
from jengine.serving.processes.supervisor import OnEnd, Supervisor
from jengine.spi import BackOff
from tests.serving.leaks import nothing_leaks, wait_until

MOCK, FAULTY = "tests.mocks.mock_engine:mock_engine", "tests.serving.faulty_engines:"
PROMPT = "The quick brown fox"
SECONDS = 60  # for what takes milliseconds on an idle machine
SHORT = SamplingParams(max_tokens=5)
LONG = SamplingParams(max_tokens=None, ignore_eos=True)


class Watched:
    """A supervisor, and its state reports."""

    def __init__(
        self, folder: Path, engine: str = MOCK, back_off: BackOff | None = None, **options: Any
    ) -> None:
        self.engines: list[EngineProcess] = []
        self.states: list[bool] = []
        self.engine, self.options = engine, {"tokenizer_folder": str(folder), **options}
        self.supervisor = Supervisor(
            "mock", self._make, on_state=self.states.append, back_off=back_off or BackOff(first=0.01)
        )

    def _make(self, on_end: OnEnd) -> EngineProcess:
        self.engines.append(EngineProcess(self.engine, self.options, on_end))
        return self.engines[-1]

    def kill(self) -> None:
        os.kill(self.engines[-1].pid or 0, signal.SIGKILL)

    async def until_state(self, serving: bool) -> None:
        async with asyncio.timeout(SECONDS):
            while self.supervisor.serving != serving:
                await asyncio.sleep(0.002)

    async def ask(self, params: SamplingParams = SHORT) -> RequestOutput:
        return [output async for output in self.supervisor.llm.generate(PROMPT, params, output_kind="final")][
            -1
        ]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with nothing_leaks():
        asyncio.run(main())


def test_back_off() -> None:
    back_off = BackOff(first=0.5, longest=3, healthy=60)
    assert [back_off.after(lived) for lived in (10, 0, 0, 0, 59)] == [0.5, 1, 2, 3, 3]
    assert [back_off.after(lived) for lived in (60, 0, 1000)] == [0.5, 1, 0.5]


def test_when_to_come_again_follows_the_back_off(tokenizer_folder: Path) -> None:
    watched = Watched(tokenizer_folder, back_off=BackOff(first=1000, longest=4000))
    supervisor = watched.supervisor

    async def main() -> None:
        await supervisor.start()
        assert 1000 < supervisor.retry_seconds < 1100, (
            "as it would be if the engine died now: its streams end before the supervisor knows"
        )
        watched.kill()
        await watched.until_state(False)
        assert 900 < supervisor.retry_seconds < 1100
        supervisor._expected = time.monotonic() - 20
        assert 9 < supervisor.retry_seconds < 30, "a start that is overdue"
        await supervisor.close()

    run(main)


def test_a_retired_model_answers_but_counts_as_not_serving(tokenizer_folder: Path) -> None:
    watched = Watched(tokenizer_folder)

    async def main() -> None:
        await watched.supervisor.start()
        watched.supervisor.retire()
        assert not watched.supervisor.serving and (await watched.ask()).finished
        watched.kill()
        async with asyncio.timeout(SECONDS):
            while not watched.supervisor.restarts:
                await asyncio.sleep(0.002)
        assert not watched.supervisor.serving and (await watched.ask()).finished
        await watched.supervisor.close()

    run(main)
    assert watched.states == [True, False]


def test_streams_of_a_killed_engine_end_and_another_takes_over(tokenizer_folder: Path) -> None:
    watched = Watched(tokenizer_folder, seconds=0.001, max_model_len=100_000, pages=10**6)
    supervisor = watched.supervisor

    async def main() -> None:
        await supervisor.start()
        info = supervisor.info
        assert (info.name, info.has_chat_template, info.limits.max_num_seqs) == ("mock", True, 32)
        for round in range(3):
            streams = [asyncio.create_task(watched.ask(LONG)) for _ in range(32)]
            while supervisor.llm.load.running < 32:
                await asyncio.sleep(0.001)
            watched.kill()
            async with asyncio.timeout(SECONDS):
                ends = await asyncio.gather(*streams, return_exceptions=True)
            assert all(isinstance(end, EngineDead) for end in ends)
            await watched.until_state(False)
            with pytest.raises(EngineDead):
                await watched.ask()
            await watched.until_state(True)
            assert (await watched.ask()).finished
            assert supervisor.restarts == round + 1
        await supervisor.close()

    run(main)
    assert watched.states == [True, False] * 4


def test_a_slow_reader_learns_of_the_death_too(tokenizer_folder: Path) -> None:
    """Though another engine has taken over by the time it reads on."""
    watched = Watched(tokenizer_folder, seconds=0.001, max_model_len=100_000, pages=10**6)

    async def main() -> None:
        await watched.supervisor.start()
        outputs = watched.supervisor.llm.generate(PROMPT, LONG)
        await anext(outputs)
        watched.kill()
        await watched.until_state(False)
        await watched.until_state(True)
        with pytest.raises(EngineDead, match="signal 9"):
            await anext(outputs)
        await watched.supervisor.close()

    run(main)


def test_counters_do_not_fall_when_an_engine_is_replaced(tokenizer_folder: Path) -> None:
    watched = Watched(tokenizer_folder, page_size=2)
    supervisor, queried, hits, tokens = watched.supervisor, [], [], 0

    def counted() -> Load:
        queried.append(supervisor.load.prefix_queries)
        hits.append((supervisor.load.prefix_hits, supervisor.load.hit_pages))
        return supervisor.load

    async def ask() -> None:
        nonlocal tokens
        tokens += len((await watched.ask()).outputs[0].token_ids)
        assert supervisor.generated == tokens > 0

    async def main() -> None:
        await supervisor.start()
        for _ in range(2):
            await ask()
        assert counted() == supervisor.llm.load
        watched.engines[0].restarts = 3  # of its replicas
        assert supervisor.restarts == 3
        for _ in range(2):
            watched.kill()
            await watched.until_state(False)
            with pytest.raises(EngineDead):
                _ = supervisor.load
            await watched.until_state(True)
            counted()
            await ask()
            assert supervisor.llm.load.prefix_hits == 0, "a new engine has cached nothing"
            counted()
        await supervisor.close()

    run(main)
    once = queried[0] // 2
    assert once > 4 and [count // once for count in queried] == [2, 2, 3, 3, 4]
    assert len(set(hits)) == 1 and hits[0][0] == 2 * hits[0][1][0] > 0
    assert supervisor.restarts == 5


def test_the_first_engine_must_start(tokenizer_folder: Path) -> None:
    watched = Watched(tokenizer_folder, FAULTY + "refuses")
    watched.options = {"error": "InvalidArgument", "text": "too long"}

    async def main() -> None:
        with pytest.raises(InvalidArgument, match="too long"):
            await watched.supervisor.start()
        with pytest.raises(EngineDead):
            _ = watched.supervisor.llm
        await watched.supervisor.close()

    run(main)
    assert watched.states == []


def test_restarts_are_tried_again_ever_more_slowly(
    tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "started"
    waits: list[float] = []

    class Recorded(BackOff):
        def after(self, lived: float) -> float:
            waits.append(super().after(lived))
            if len(waits) == 4:
                mark.unlink()  # what prevented the start has gone
            return waits[-1]

    watched = Watched(
        tokenizer_folder, FAULTY + "starts_once", Recorded(first=0.01, longest=0.04), mark=str(mark)
    )

    async def main() -> None:
        await watched.supervisor.start()
        watched.kill()
        await watched.until_state(False)
        await watched.until_state(True)
        assert (await watched.ask()).finished
        await watched.supervisor.close()

    run(main)
    assert waits == [0.01, 0.02, 0.04, 0.04] and watched.supervisor.restarts == 1
    assert "signal 9" in caplog.messages[0] and all(
        "the device is not free yet" in message for message in caplog.messages[1:]
    )


def test_a_fault_in_making_text_brings_another_engine(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tokenizer_folder)

    async def main() -> None:
        await watched.supervisor.start()
        with monkeypatch.context() as patch:
            patch.setattr(watched.supervisor.llm._requests._live, "take", lambda updates: 1 // 0)
            with pytest.raises(EngineDead, match="ZeroDivisionError"):
                await watched.ask()
        await watched.until_state(False)
        await watched.until_state(True)
        assert (await watched.ask()).finished
        await watched.supervisor.close()

    run(main)


@pytest.mark.parametrize("drain, reason", [(60.0, "length"), (0.0, "abort")])
def test_close_drains(tokenizer_folder: Path, drain: float, reason: str) -> None:
    watched = Watched(tokenizer_folder, seconds=0.001, pages=10**6)

    async def main() -> None:
        await watched.supervisor.start()
        streams = [asyncio.create_task(watched.ask(LONG)) for _ in range(40)]
        while watched.supervisor.llm.load.running < 32:
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(watched.supervisor.close(drain))
        await asyncio.sleep(0)
        assert watched.states == [True, False]
        await closing
        with pytest.raises(EngineDead):
            await watched.ask()
        assert {output.outputs[0].finish_reason for output in await asyncio.gather(*streams)} == {reason}

    run(main)
    assert len(watched.engines) == 1


def test_a_drain_can_be_cut_short(tokenizer_folder: Path) -> None:
    watched = Watched(tokenizer_folder, seconds=0.05)

    async def main() -> None:
        await watched.supervisor.start()
        stream = asyncio.create_task(watched.ask(LONG))
        while not watched.supervisor.llm.load.running:
            await asyncio.sleep(0.001)
        slow = asyncio.create_task(watched.supervisor.close(60))
        await asyncio.sleep(0.01)
        await asyncio.gather(watched.supervisor.close(), slow)
        assert (await stream).outputs[0].stop_reason == "shutdown"

    run(main)


def test_an_engine_that_dies_in_the_drain_is_not_replaced(tokenizer_folder: Path) -> None:
    watched = Watched(tokenizer_folder, seconds=0.05)

    async def main() -> None:
        await watched.supervisor.start()
        stream = asyncio.create_task(watched.ask(LONG))
        while not watched.supervisor.llm.load.running:
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(watched.supervisor.close(60))
        await asyncio.sleep(0.01)
        watched.kill()
        await closing
        with pytest.raises(EngineDead):
            await stream

    run(main)
    assert len(watched.engines) == 1


@pytest.mark.parametrize("waiting", [True, False])
def test_close_in_a_restart(tokenizer_folder: Path, tmp_path: Path, waiting: bool) -> None:
    watched = Watched(tokenizer_folder, back_off=BackOff(first=3600 if waiting else 0.01))
    mark = tmp_path / "begun"

    async def main() -> None:
        await watched.supervisor.start()
        watched.engine, watched.options = FAULTY + "starts_slowly", {"mark": str(mark)}
        watched.kill()
        await watched.until_state(False)
        if not waiting:
            await asyncio.to_thread(wait_until, mark.exists)
        async with asyncio.timeout(SECONDS):
            await watched.supervisor.close(60)

    run(main)
    assert watched.supervisor.restarts == 0 and watched.states == [True, False]


def test_a_start_can_be_cancelled(tokenizer_folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "begun"
    watched = Watched(tokenizer_folder, FAULTY + "starts_slowly")
    watched.options = {"mark": str(mark)}

    async def main() -> None:
        starting = asyncio.create_task(watched.supervisor.start())
        await asyncio.to_thread(wait_until, mark.exists)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await watched.supervisor.close()

    run(main)
