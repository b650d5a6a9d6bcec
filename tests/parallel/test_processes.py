"""Two real processes with two devices each that share a model, or four with one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jengine import LLM, EngineConfig, InvalidArgument, follow
from jengine.spi import start_engine
from tests.engine.on_demand import on_demand
from tests.golden.weights import Golden, write_model
from tests.parallel.processes import OPTIONS, PROMPTS, answers

ROOT = Path(__file__).parent.parent.parent
SECONDS = 5.0  # in which every request ends after a process did


@contextmanager
def processes_of(
    folder: Path, act: str, count: int = 2, devices: int = 4, **options: object
) -> Iterator[list[subprocess.Popen[str]]]:
    """So many processes, with so many devices together."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices // count),
    }
    more = json.dumps({**options, "num_processes": count})
    commands = [
        [sys.executable, "-m", "tests.parallel.processes", str(folder), port, str(process), act, more]
        for process in range(count)
    ]
    started = [
        subprocess.Popen(
            c, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for c in commands
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def line(process: subprocess.Popen[str], start: str) -> str:
    """The next line of output with this prefix; Gloo prints other lines."""
    assert process.stdout is not None and process.stderr is not None
    for text in process.stdout:
        if start in text:
            return text[text.index(start) :]
    raise AssertionError(process.stderr.read())


def test_they_give_the_tokens_of_one(text_model: Path) -> None:
    """Hits, copied pages, updates of slots, and pages that went to the host and came back among their
    steps. How many calls there are depends on measured costs.
    """
    with on_demand(), LLM(text_model, progress=False, **OPTIONS) as llm:
        alone = answers(llm)
    with processes_of(text_model, "answers") as processes:
        together = json.loads(line(processes[0], "[["))
        for tokens, hits, calls, swapped in (alone, together):
            assert len(tokens) == 5 * len(PROMPTS) + 6 and hits > 100 and swapped
            assert min(calls["copy"], calls["update"]) > 0
        assert together[:2] == [*alone[:2]]
        assert [process.wait(60) for process in processes] == [0, 0]


@pytest.mark.parametrize(
    ("count", "stages", "tensor"),
    [(2, 2, 1), *(pytest.param(*one, marks=pytest.mark.full) for one in ((2, 2, 2), (4, 4, 1), (4, 2, 2)))],
)
def test_stages_in_processes_of_their_own(count: int, stages: int, tensor: int, text_model: Path) -> None:
    """Hidden states and tokens pass between processes; a stage may itself lie in several."""
    model = text_model if stages == 2 else Path("demo")  # which has four layers
    with on_demand(), LLM(model, progress=False, **OPTIONS) as llm:
        alone = answers(llm)
    parallel = {"pipeline_parallel_size": stages, "tensor_parallel_size": tensor}
    with processes_of(model, "answers", count, stages * tensor, **parallel) as processes:
        together = json.loads(line(processes[0], "[["))
        assert together[0] == alone[0] and together[3]
        assert [process.wait(60) for process in processes] == [0] * count


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_v3"])
def test_they_share_experts(variant: str, count: int, tmp_path: Path) -> None:
    write_model(tmp_path, variant)
    with processes_of(tmp_path, f"experts:{count},{variant}", count) as processes:
        tokens = json.loads(line(processes[0], "[["))
        assert tokens == [case.tokens.tolist() for case in Golden.read(variant).cases]
        assert [process.wait(60) for process in processes] == [0] * count


@pytest.mark.full
def test_a_program_is_ready_when_every_process_has_it(text_model: Path, tmp_path: Path) -> None:
    with processes_of(text_model, f"widen:{tmp_path / 'go'}") as processes:
        before, after = json.loads(line(processes[0], "[["))
        ready, total, rows, complete = before
        assert ready < total and rows == 8 and not complete
        assert after[:3] == [total, total, 16]
        assert [process.wait(60) for process in processes] == [0, 0]


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.full)],
)
def test_every_request_ends_when_one_of_them_dies(options: dict[str, int], text_model: Path) -> None:
    with processes_of(text_model, "wait", **options) as processes:
        line(processes[0], "running")
        killed = time.time()
        processes[1].kill()
        endings = json.loads(line(processes[0], "[["))
        assert len(endings) == len(PROMPTS)
        for reason, when in endings:
            assert "process 1 of this engine has ended" in reason
            assert when - killed < SECONDS
        assert processes[0].wait(SECONDS) == 1


def test_the_others_end_when_process_0_dies(text_model: Path) -> None:
    with processes_of(text_model, "wait") as processes:
        line(processes[0], "running")
        processes[0].kill()
        # 1, or an abort: JAX's coordinator was in process 0, and may be missed first
        assert processes[1].wait(SECONDS) != 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 2}, "coordinator=None: must be host:port"),
        ({"num_processes": 2, "coordinator": "here"}, "coordinator='here': must be host:port"),
        ({"process_id": 1}, "process_id=1: must be below num_processes=1"),
        ({"num_processes": 0}, "num_processes=0: must be a whole number, at least 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        EngineConfig.of("demo", options)


def test_who_takes_requests_and_who_follows() -> None:
    shared = {"num_processes": 2, "coordinator": "127.0.0.1:1"}
    with pytest.raises(InvalidArgument, match="process_id=1: only process 0 takes requests"):
        start_engine(EngineConfig.of("demo", {**shared, "process_id": 1}))
    with pytest.raises(InvalidArgument, match="process_id=0: process 0 takes requests"):
        follow(EngineConfig.of("demo", shared))
