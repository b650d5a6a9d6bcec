"""A server that starts says what it does, and how long it may take: over HTTP, gRPC, in its log and to its
client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from jengine import EngineDead, Load
from jengine.serving.grpc.client import Client, Retries, ServerError
from jengine.serving.logs import StatusSample, line, write_status
from jengine.serving.processes.engine_process import StartProgress
from jengine.serving.processes.wire import Starting
from jengine.spi import StepTotals
from tests.serving.leaks import wait_until
from tests.serving.processes import free_port, mock_process


@pytest.mark.parametrize(
    ("news", "seconds", "text", "left"),
    [
        (Starting("loading weights", "B", 450, 1000), 9.0, "loading weights, 45 %", None),
        (Starting("reading the configuration", "", 0, 0), 9.0, "reading the configuration", None),
        (
            Starting("compiling", "program", 0, 41),
            9.0,
            "compiling, 0 of 41 programs, time left unknown",
            None,
        ),
        (
            Starting("compiling", "program", 2, 41),
            9.0,
            "compiling, 2 of 41 programs, time left unknown",
            None,
        ),
        (
            Starting("compiling", "program", 12, 41),
            999.2,
            "compiling, 12 of 41 programs, about 2898 s left",
            2897.68,
        ),
        (Starting("compiling", "program", 41, 41), 9.0, "compiling, 41 of 41 programs", 0.0),
    ],
)
def test_progress_in_words(news: Starting, seconds: float, text: str, left: float | None) -> None:
    progress = StartProgress(news, first=2, since=time.monotonic() - seconds)
    assert str(progress) == text
    assert progress.seconds_left == (None if left is None else pytest.approx(left, rel=0.1))
    assert (
        progress.after(news).since
        == progress.since
        < StartProgress(news).after(Starting("measuring", "", 0, 0)).since
    )


def test_the_first_program_does_not_count_in_estimates() -> None:
    """It takes longest: its time for each of the others would keep clients away for long."""
    progress = StartProgress(Starting("compiling", "program", 0, 9), since=time.monotonic() - 60)
    progress = progress.after(Starting("compiling", "program", 1, 9))
    assert progress.seconds_left is None
    progress = progress.after(Starting("compiling", "program", 5, 9))
    assert progress.seconds_left is not None and progress.seconds_left < 60


def a_load(**fields: Any) -> Load:
    return Load(
        **{
            "running": 0,
            "waiting": 0,
            "free_pages": 80,
            "pages": 100,
            "preemptions": 0,
            "compiles_since_start": 0,
            **fields,
        }
    )


def test_a_line_of_statistics_only_if_anything_happened() -> None:
    idle = StatusSample(100.0, a_load(), 0, 0)
    assert line(idle, idle._replace(at=110.0)) is None
    busy = StatusSample(110.0, a_load(running=2, waiting=1, prefix_queries=80, prefix_hits=60), 50, 200)
    text = (
        "running: 2, waiting: 1; prompt: 5.0 tokens/s; generation: 20.0 tokens/s; KV cache: 20.0 %; prefix"
        " hits: 75.0 %"
    )
    assert line(idle, busy) == text
    some, every = (idle._replace(load=a_load(programs_ready=ready, programs=41)) for ready in (12, 41))
    assert line(idle, some) == "12 of 41 programs are ready"
    assert line(some, every) == "all 41 programs are ready" and line(every, every) is None
    assert StepTotals().prompt_tokens == 0, "what the log reads"


class Engine:
    """Goes through these states, one at each look: what it does while it starts, or its load."""

    totals, generated = StepTotals(), 0

    def __init__(self, states: list[str | Load]) -> None:
        self.states = states

    @property
    def load(self) -> Load:
        if not self.states:
            raise asyncio.CancelledError
        self.now = self.states.pop(0)
        if isinstance(self.now, str):
            raise EngineDead("it starts")
        return self.now

    @property
    def why_not_ready(self) -> str:
        return str(self.now)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_every_ten_seconds(
    terminal: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it starts, only without a terminal; while it serves, if anything happens; and again after a
    restart.
    """
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    states = [
        "loading weights",
        "compiling",
        a_load(),
        a_load(),
        a_load(running=2),
        "loading programs",
        a_load(),
        a_load(waiting=1),
    ]
    with caplog.at_level(logging.INFO, "jengine.serving"), contextlib.suppress(asyncio.CancelledError):
        asyncio.run(write_status(Engine([*states])))
    starts = [] if terminal else ["loading weights", "compiling"], [] if terminal else ["loading programs"]
    expected = [*starts[0], "running: 2, waiting: 0", *starts[1], "running: 0, waiting: 1"]
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == expected
    assert slept == [10.0] * len(states)


def test_every_interface_says_how_far_the_start_is(tokenizer_folder: Path, tmp_path: Path) -> None:
    mark, ports = tmp_path / "mark", {name: free_port() for name in ("grpc_port", "port", "metrics_port")}
    engine = {
        "engine": "tests.serving.faulty_engines:starts_in_steps",
        "mark": str(mark),
        "tokenizer_folder": str(tokenizer_folder),
    }
    with mock_process(tokenizer_folder, server=ports, **engine) as server:
        address, http = f"127.0.0.1:{ports['grpc_port']}", f"http://127.0.0.1:{ports['port']}"
        expected = "starting: compiling, 3 of 9 programs, about "

        answer: Any = None

        def compiles() -> bool:
            nonlocal answer
            try:
                answer = httpx.get(f"{http}/health", timeout=60).json()
            except httpx.TransportError as error:  # it does not listen yet
                answer = error
                return False
            return bool(answer["error"]["message"].startswith(expected))

        wait_until(compiles, lambda: f"{answer!r}; {server.log}")
        for path in ("/health", "/v1/models"):
            answer = httpx.get(http + path, timeout=60)
            assert answer.status_code == 503 and answer.json()["error"]["message"].startswith(expected)
            assert int(answer.headers["retry-after"]) >= 1
        probe = httpx.get(f"http://127.0.0.1:{ports['metrics_port']}/readyz", timeout=60)
        assert (
            probe.status_code == 503
            and probe.text.startswith(expected)
            and int(probe.headers["retry-after"]) >= 1
        )
        with Client(address, retries=Retries(attempts=1)) as client:
            with pytest.raises(ServerError, match=expected) as refused:
                client.generate([70], max_tokens=1)
            assert refused.value.code is grpc.StatusCode.UNAVAILABLE and refused.value.retry_seconds
            with pytest.raises(ServerError, match=expected):
                client.wait_until_ready(timeout=0.01)
            said: list[str] = []

            def heard(text: str) -> None:
                said.append(text)
                mark.touch()

            client.wait_until_ready(progress=heard)
            assert said[0].startswith(expected) and client.generate([70], max_tokens=1).outputs
        wait_until(lambda: "INFO starting: " in server.log and "INFO ready in " in server.log)
