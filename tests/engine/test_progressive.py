"""An engine that serves with its first programs while others are compiled: no request waits for these, and
tokens do not change."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jengine.core.config import EngineConfig
from jengine.core.request import SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.setup import prepare as prepare_module
from jengine.engine.start import start_engine
from jengine.execution import programs as programs_module
from jengine.execution.compile_children import CompileChildren
from jengine.execution.programs import Built, Programs, first_keys
from jengine.execution.runner import Runner
from jengine.table.program_table import TrunkKey
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Work, prompts, run
from tests.golden.weights import write_model

OPTIONS = {**SMALL, "max_num_seqs": 16, "max_num_batched_tokens": 80, "max_model_len": 192}
PATIENCE = 300.0  # seconds, of a busy machine


class Gate:
    """Lets a given number of background compilations proceed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._open, self._arrived = threading.Semaphore(0), threading.Semaphore(0)
        compile_all = programs_module.compile_all

        def gated(*args: Any, background: bool = False, **options: Any) -> Iterator[Built]:
            building = compile_all(*args, background=background, **options)
            while True:
                if background:
                    self._arrived.release()
                    assert self._open.acquire(timeout=PATIENCE)
                built = next(building, None)
                if built is None:
                    return
                yield built

        patch.setattr(programs_module, "compile_all", gated)

    def wait(self) -> None:
        """Waits until the next one has reached the gate."""
        assert self._arrived.acquire(timeout=PATIENCE)

    def open(self, count: int = 1000) -> None:
        self._open.release(count)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def start(folder: Path, **options: Any) -> Engine:
    return start_engine(EngineConfig.of(str(folder), {**OPTIONS, **options}), progress=False)[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("progressive") / "model"
    write_model(folder, "llama_gqa")
    return folder


@pytest.fixture(scope="module")
def whole(model: Path) -> Engine:
    with on_demand():
        return start(model)


def work() -> list[Work]:
    """Requests of every sampler variant, several samples of one prompt, and prompts of several tiles with log
    probabilities."""
    rng = np.random.default_rng(0)
    params = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 9, "n": 3},
        {"temperature": 1.1, "logprobs": 2, "frequency_penalty": 0.5},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    texts = prompts(20, vocab=96, longest=130, seed=3)
    return [
        (text, SamplingParams(**params[i % len(params)], seed=i, max_tokens=int(rng.integers(4, 24))))  # type: ignore[arg-type]
        for i, text in enumerate(texts)
    ]


def tokens(engine: Engine) -> list[list[int]]:
    return [answer.tokens for answer in run(engine, work())]


def test_no_step_waits_for_a_compilation(
    gate: Gate, model: Path, whole: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all other compilations blocked, every request is answered as by an engine with the whole table."""
    read = Runner.read
    # so that all steps count
    monkeypatch.setattr(Runner, "read", lambda self, step: dataclasses.replace(read(self, step), waited=True))
    expected = tokens(whole)
    engine = start(model, warm_up="progressive", cache_dir=tmp_path)
    gate.wait()
    first, total = engine.load.programs_ready, engine.load.programs
    assert first == len(first_keys(engine.runner.spec)) < total  # type: ignore[attr-defined]
    assert not engine.wait_until_compiled(timeout=0.0)
    assert tokens(engine) == expected
    assert engine.scheduler.predictor.ready.max_rows == 8 and engine.load.programs_ready == first
    assert {str(step.trunk) for step in engine.records.steps} == {"trunk[16+0t]", "trunk[8+1t]"}
    for ready in range(first + 1, total, 8):
        gate.open(8)
        for _ in range(min(8, total - ready)):
            gate.wait()
        assert tokens(engine) == expected
    gate.open()
    assert engine.wait_until_compiled(PATIENCE) and tokens(engine) == expected
    assert engine.scheduler.predictor.ready.max_rows == 16 and engine.compiles_since_start == 0
    assert {TrunkKey(16, 0), TrunkKey(16, 1)} <= {*engine.scheduler.predictor.costs.known}, (
        "learned from steps"
    )
    engine.close()


def test_an_engine_whose_programs_other_processes_compile(
    model: Path, whole: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers as one that compiles itself, and neither traces, lowers, compiles nor serializes after its
    start.
    """
    events, asked, stepped_aside = list[str](), list[CompileChildren](), list[CompileChildren]()

    def heard(event: str, *_: object, **__: object) -> None:
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    def children(*_: object) -> CompileChildren:
        asked.append(CompileChildren(2))
        return asked[-1]

    def refuse(*_: object) -> None:
        raise AssertionError("this process compiles or serializes a program")

    monkeypatch.setattr(prepare_module, "make_children", children)
    # with the lowest priority they would get nothing from a busy machine
    monkeypatch.setattr(CompileChildren, "step_aside", lambda children: stepped_aside.append(children))
    monkeypatch.setattr(programs_module, "compile_one", refuse)
    monkeypatch.setattr(programs_module, "packed", refuse)
    expected = tokens(whole)
    options = {"warm_up": "progressive", "cache_dir": tmp_path, "max_num_seqs": 8}
    engine = start(model, **options)
    jax.monitoring.register_event_duration_secs_listener(heard)
    assert stepped_aside == asked
    assert tokens(engine) == expected and engine.wait_until_compiled(PATIENCE)
    assert tokens(engine) == expected and not events and engine.compiles_since_start == 0
    assert engine.load.programs_ready == engine.load.programs > len(first_keys(engine.runner.spec))  # type: ignore[attr-defined]
    # as on a GPU, where programs run twice before steps use them
    monkeypatch.setattr(Runner, "on_host", False)
    runs, get = Counter[Any](), Programs.__getitem__
    monkeypatch.setattr(Programs, "__getitem__", lambda self, key: (runs.update([key]), get(self, key))[1])
    again, started = start_engine(EngineConfig.of(str(model), {**OPTIONS, **options}), progress=False)
    assert started.programs_compiled == 0 and again.wait_until_compiled(PATIENCE)
    while again.has_unused_programs:
        again.step()  # type: ignore[union-attr]
    assert again.load.programs_ready == again.load.programs
    assert all(runs[key] >= 2 for key in again.scheduler.table.all_keys())
    assert tokens(again) == expected  # type: ignore[arg-type]
    assert asked[0]._children[0]._process.poll() is not None, "they end when all programs are there"
    assert asked[1]._started == 0, "nothing is left to compile"


@pytest.mark.full
def test_compilations_while_requests_run_change_nothing(model: Path, whole: Engine, tmp_path: Path) -> None:
    engine, expected = start(model, warm_up="progressive", cache_dir=tmp_path), tokens(whole)
    rounds = 0
    while engine.load.programs_ready < engine.load.programs:
        assert tokens(engine) == expected
        rounds += 1
    assert rounds > 0 and tokens(engine) == expected and engine.compiles_since_start == 0


@pytest.mark.full
def test_what_was_compiled_before_an_interruption_is_kept(gate: Gate, model: Path, tmp_path: Path) -> None:
    first = start(model, warm_up="progressive", cache_dir=tmp_path)
    gate.wait()
    gate.open(4)
    for _ in range(4):
        gate.wait()
    first.close()
    gate.open(1)  # the one that stands there is finished
    assert not first.wait_until_compiled(PATIENCE)
    done = first.load.programs_ready
    assert done == len(first_keys(first.runner.spec)) + 5  # type: ignore[attr-defined]
    again, started = start_engine(
        EngineConfig.of(str(model), {**OPTIONS, "cache_dir": tmp_path, "warm_up": "progressive"}),
        progress=False,
    )
    gate.wait()  # all that was saved has been loaded
    assert started.programs_compiled == 0 and again.load.programs_ready == done
    gate.open()
    assert again.wait_until_compiled(PATIENCE)
    last, started = start_engine(
        EngineConfig.of(str(model), {**OPTIONS, "cache_dir": tmp_path}), progress=False
    )
    assert (started.programs_compiled, started.programs_loaded) == (
        0,
        started.programs,
    ) and last.wait_until_compiled()


@pytest.mark.full
def test_a_compilation_that_fails_leaves_the_engine_with_the_others(
    model: Path,
    whole: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compile_one = programs_module.compile_one

    def failing(spec: Any, key: Any, *options: Any) -> Built:
        if key == TrunkKey(16, 1):
            raise RuntimeError("out of registers")
        return compile_one(spec, key, *options)

    monkeypatch.setattr(programs_module, "compile_one", failing)
    engine = start(model, warm_up="progressive", cache_dir=tmp_path)
    assert not engine.wait_until_compiled(PATIENCE)
    assert engine.load.programs_ready == engine.load.programs - 1
    assert tokens(engine) == tokens(whole) and engine.scheduler.predictor.ready.max_rows == 8
    assert "trunk[16+1t] could not be compiled, the engine continues without it: out of" in caplog.text


@pytest.mark.full
def test_the_interpreter_ends_in_the_midst_of_it(model: Path, tmp_path: Path) -> None:
    """The running compilation is finished and saved; no other is started."""
    script = """
import json, sys, time
from jengine.core.config import EngineConfig
from jengine.engine.start import start_engine
engine, _ = start_engine(EngineConfig.of(sys.argv[1], json.loads(sys.argv[2])), progress=False)
first = engine.load.programs_ready
while engine.load.programs_ready == first:
    time.sleep(0.01)
print(first, engine.load.programs_ready)
"""
    options = json.dumps({**OPTIONS, "warm_up": "progressive", "cache_dir": str(tmp_path)})
    command = [sys.executable, "-W", "error", "-c", script, str(model), options]
    for _ in range(2):
        before = len([*tmp_path.rglob("*.bin")])
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert done.returncode == 0 and not done.stderr, done.stderr
        first, ready = map(int, done.stdout.split())
        assert first < ready <= len([*tmp_path.rglob("*.bin")])
    assert before >= first + 1, "the first process kept what it had compiled"
