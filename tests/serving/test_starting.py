"""A server that starts says what it does, and how long it may take: over HTTP, gRPC, in its log and to its
client.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from jengine import Load, StepTotals
from jengine.serving.grpc.client import Client, Retries, ServerError
from jengine.serving.logs.status_log import Sample, line
from jengine.serving.processes.starting import StartProgress
from jengine.serving.processes.wire import Starting
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
            Starting("compiling", "program", 12, 41),
            1199.2,
            "compiling, 12 of 41 programs, about 2899 s left",
            2898.0,
        ),
        (Starting("compiling", "program", 41, 41), 9.0, "compiling, 41 of 41 programs", 0.0),
    ],
)
def test_progress_in_words(news: Starting, seconds: float, text: str, left: float | None) -> None:
    progress = StartProgress(news, since=time.monotonic() - seconds)
    assert str(progress) == text
    assert progress.seconds_left == (None if left is None else pytest.approx(left, rel=0.1))
    assert (
        progress.after(news).since
        == progress.since
        < StartProgress(news).after(Starting("measuring", "", 0, 0)).since
    )


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
    idle = Sample(100.0, a_load(), 0, 0)
    assert line(idle, idle._replace(at=110.0)) is None
    busy = Sample(110.0, a_load(running=2, waiting=1, prefix_queries=80, prefix_hits=60), 50, 200)
    text = (
        "running: 2, waiting: 1; prompt: 5.0 tokens/s; generation: 20.0 tokens/s; KV cache: 20.0 %; prefix"
        " hits: 75.0 %"
    )
    assert line(idle, busy) == text
    assert (
        line(idle, idle._replace(load=a_load(programs_ready=12, programs=41)))
        == "compiled in the background: 12 of 41 programs"
    )
    assert StepTotals().prompt_tokens == 0, "what the log reads"


def test_every_interface_says_how_far_the_start_is(tokenizer_folder: Path, tmp_path: Path) -> None:
    mark, ports = tmp_path / "mark", {name: free_port() for name in ("port", "http_port", "metrics_port")}
    engine = {
        "engine": "tests.serving.faulty_engines:starts_in_steps",
        "mark": str(mark),
        "tokenizer_folder": str(tokenizer_folder),
    }
    with mock_process(tokenizer_folder, server=ports, **engine) as server:
        address, http = f"127.0.0.1:{ports['port']}", f"http://127.0.0.1:{ports['http_port']}"
        expected = "starting: compiling, 3 of 9 programs, about "

        def compiles() -> bool:
            with contextlib.suppress(httpx.TransportError):  # it does not listen yet
                return bool(
                    httpx.get(f"{http}/health", timeout=60).json()["error"]["message"].startswith(expected)
                )
            return False

        wait_until(compiles)
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
