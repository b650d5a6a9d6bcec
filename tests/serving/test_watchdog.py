"""Hanging engine processes are detected, reported with their stacks, killed and replaced. Limits are short
here, and waits long."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import pytest

from jengine import EngineDead
from jengine.engine.operations import LoadWeights, Operation, Pause, Sleep, WakeUp
from jengine.serving.grpc.client import Client, ServerError
from jengine.serving.processes import watchdog
from jengine.serving.processes.engine_child import EngineChild
from jengine.serving.processes.engine_process import EngineProcess
from jengine.serving.processes.watchdog import IDLE, STARTING, WORKING, Beat, Heartbeat, Patience
from jengine.serving.processes.wire import Do
from jengine.spi import Request
from tests.mocks.mock_engine import MockEngine
from tests.serving.children import LONG, MOCK
from tests.serving.leaks import alive, nothing_leaks, wait_until
from tests.serving.processes import HealthWatch, ServerProcess, mock_process
from tests.serving.streams import Stream

ONE = Request(request_id="one", prompt_token_ids=[1, 2], params=LONG)


# --- what is decided from beats --------------------------------------------------------------------


def verdicts(*events: tuple[float, Beat | None]) -> list[bool]:
    patience = Patience(10.0)
    return [patience.after(passed, beat) is not None for passed, beat in events]


def test_silence() -> None:
    """A longer silence is allowed during the start."""
    assert verdicts((9, None), (1, None), (0.1, None)) == [False] * 3
    assert verdicts((60, None), (0.1, None)) == [False, True]
    for phase in (IDLE, WORKING):
        assert verdicts((1, Beat(phase, 1, 0.0)), (10, None), (0.1, None)) == [False, False, True]
        assert (
            verdicts((1, Beat(phase, 1, 0.0)), (10, None), (0.1, Beat(phase, 2, 0.0)), (10, None))
            == [False] * 4
        )


def test_a_loop_without_turns() -> None:
    working = Beat(WORKING, 7, 0.0)
    assert verdicts((1, working), (10, working), (0.1, working)) == [False, False, True]
    assert (
        verdicts((1, working), (10, working), (0.1, Beat(WORKING, 8, 0.0)), (10, Beat(WORKING, 8, 0.0)))
        == [False] * 4
    )
    assert verdicts((1, working), (9, None), (1, working), (0.1, working)) == [
        False,
        False,
        False,
        True,
    ], "some beats come late"
    for phase in (STARTING, IDLE):
        assert verdicts(*[(100, Beat(phase, 7, 0.0))] * 3) == [False] * 3, (
            "it has nothing to do, or is not there yet"
        )


def test_long_steps_have_time() -> None:
    working = Beat(WORKING, 7, 4.0)
    assert verdicts((1, working), (30, working), (0.1, working)) == [False, False, True]


def test_a_heartbeat_knows_the_longest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for requests is none."""
    now = 0.0
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    ours, theirs = os.pipe()
    heartbeat = Heartbeat(theirs, 0)
    heartbeat.ready(longest_step=2.0)
    heartbeat.turn()
    now = 3.0
    heartbeat.turn()
    with heartbeat.idle():
        assert heartbeat._phase == IDLE
        now = 100.0
    now = 101.0
    heartbeat.turn()
    assert (heartbeat._longest, heartbeat._phase, heartbeat._turns) == (3.0, WORKING, 4)
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("operation", "phase"),
    [(LoadWeights("a folder"), IDLE), (Sleep(), IDLE), (WakeUp(), IDLE), (Pause(), WORKING)],
)
def test_operations_that_move_weights_may_take_any_time(
    operation: Operation[Any], phase: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    heartbeat = Heartbeat(-1, 0)
    phases: list[int] = []

    class Engine(MockEngine):
        def do(self, operation: Operation[Any]) -> Any:
            nonlocal now
            now += 100.0
            phases.append(heartbeat._phase)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = EngineChild(theirs, heartbeat)
        child._engine = Engine()
        heartbeat.turn()
        child._pass_on(Do(1, type(operation).__name__, msgspec.json.encode(operation)))
        call = child._inbox.get_nowait()
        assert call is not None
        call()
        heartbeat.turn()
    assert (phases, heartbeat._longest) == ([phase], 100.0 if phase == WORKING else 0.0)


def test_programs_that_arrive_run_when_the_engine_is_idle() -> None:
    class Engine(MockEngine):
        @property
        def has_unused_programs(self) -> bool:
            return True

    answers = iter([queue.Empty])

    def get(timeout: float | None) -> None:
        for error in answers:
            raise error

    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = EngineChild(theirs, Heartbeat(-1, 0))
        child._engine = Engine()
        child._inbox = SimpleNamespace(empty=lambda: True, get=get)  # type: ignore[assignment]
        assert child._take_orders(True), "the loop steps, rather than wait until it is to end"


# --- processes -------------------------------------------------------------------------------------


@contextmanager
def watched(
    limit: float = 1.5, engine: str = MOCK, **options: Any
) -> Iterator[tuple[EngineProcess, list[Any], list[Any]]]:
    """A running engine process, the errors of its callers, and its ends."""
    deaths: list[Any] = []
    ends: list[Any] = []
    with nothing_leaks():
        process = EngineProcess(engine, options, ends.append, limit)
        try:
            process.start()
            process.connect(lambda updates: None, deaths.append)
            yield process, deaths, ends
        finally:
            process.quit()


@pytest.mark.parametrize("busy", [False, True])
def test_a_stopped_process_is_given_up(busy: bool) -> None:
    with watched(seconds=0.005) as (process, deaths, ends):
        if busy:
            process.add(ONE)
            wait_until(lambda: process.load.running == 1)
        os.kill(process.pid or 0, signal.SIGSTOP)
        wait_until(lambda: bool(ends))
        assert (
            deaths == ends and isinstance(deaths[0], EngineDead) and "has not answered for" in str(deaths[0])
        )
        wait_until(lambda: not alive(process.pid or 0))


def test_the_reason_is_told_before_the_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that see the process end must already have the reason."""
    monkeypatch.setattr(watchdog, "START_SECONDS", 0.2)
    at_end: list[int | None] = []

    def spawn(beats: int, interval: float) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sh", "-c", "trap '' USR1; exec sleep 600"], pass_fds=[beats])

    def tell(why: str) -> None:
        time.sleep(0.5)  # a killed process ends meanwhile
        at_end.append(watched.process.poll())

    watched = watchdog.Watchdog(0.2, spawn, tell)
    assert watched.process.wait(60) == -signal.SIGKILL
    watched.join(60)
    assert at_end == [None]


def test_a_loop_that_hangs_is_given_up_and_shows_where(capfd: pytest.CaptureFixture[str]) -> None:
    """Though the process answers."""
    with watched(seconds=3600) as (process, deaths, ends):
        process.add(ONE)
        wait_until(lambda: bool(ends))
        assert deaths == ends and "has been in one step for" in str(deaths[0])
    stacks = capfd.readouterr().err
    assert "mock_engine.py" in stacks and "in step" in stacks and "Thread 0x" in stacks


def test_long_steps_that_were_measured_do_no_harm() -> None:
    """A step of twice the limit."""
    with watched(0.5, "tests.serving.faulty_engines:slow_but_known", seconds=1.0) as (process, deaths, _):
        process.add(ONE)
        wait_until(lambda: process.load.running == 1)
        assert not deaths


def test_a_start_is_as_long_as_it_takes() -> None:
    """A start may take any time, but needs signs of life."""
    with watched(0.2, "tests.serving.faulty_engines:starts_late", seconds=1.0) as (process, _, ends):
        assert process.info and not ends


def test_a_stopped_start_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "START_SECONDS", 3.0)
    mark, errors = tmp_path / "begun", []

    def start() -> None:
        try:
            process.start()
        except EngineDead as error:
            errors.append(str(error))

    with nothing_leaks():
        process = EngineProcess("tests.serving.faulty_engines:starts_slowly", {"mark": mark}, None, 1.0)
        thread = threading.Thread(target=start)
        thread.start()
        wait_until(lambda: mark.exists() and bool(mark.read_text()))
        os.kill(process.pid or 0, signal.SIGSTOP)
        thread.join(30)
        assert "has not answered for" in errors[0]


def test_without_a_watchdog_it_may_stand_still() -> None:
    with watched(0, seconds=0.01) as (process, deaths, _):
        os.kill(process.pid or 0, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(process.pid or 0, signal.SIGCONT)
        process.add(ONE)
        wait_until(lambda: process.load.running == 1)
        assert not deaths


def test_callers_do_not_wait_for_one_that_cannot_be_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its end never comes, as where a driver holds it."""
    order: list[str] = []

    def wait(self: object, seconds: float) -> int:
        order.append("waited")
        raise subprocess.TimeoutExpired("engine", seconds)

    with nothing_leaks():
        process = EngineProcess(MOCK, {}, None, 1.0)
        process.start()
        process.connect(lambda updates: None, lambda error: order.append("told"))
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "wait", wait)
            os.kill(process.pid or 0, signal.SIGSTOP)
            wait_until(lambda: len(order) == 3)
            process.quit()  # comes back
        assert order == ["told", "waited", "waited"] and "cannot be killed" in caplog.text
        process._child.process.wait()  # type: ignore[union-attr]


def test_it_may_be_started_in_a_thread_that_ends() -> None:
    """The kernel would kill it with the thread that started it."""
    with nothing_leaks():
        process = EngineProcess(MOCK, {"seconds": 0.02})  # the request runs for a while
        thread = threading.Thread(target=process.start)
        thread.start()
        thread.join()
        deaths: list[Any] = []
        process.connect(lambda updates: None, deaths.append)
        process.add(ONE)
        wait_until(lambda: process.load.running == 1)
        assert not deaths
        process.quit()


# --- servers ---------------------------------------------------------------------------------------


def metrics_of(server: ServerProcess) -> str:
    text: str = urllib.request.urlopen(server.metrics, timeout=20).read().decode()
    return text


def test_a_server_replaces_an_engine_that_is_stopped(tokenizer_folder: Path) -> None:
    options = {"metrics_port": 0, "watchdog_seconds": 1.5}
    with mock_process(
        tokenizer_folder, seconds=0.02, max_model_len=10**6, pages=10**6, server=options
    ) as server:
        server.wait_until_ready()
        with Client(server.address) as client, grpc.insecure_channel(server.address) as channel:
            watch = HealthWatch(channel)
            watch.wait_for("SERVING")
            stream = Stream(client, max_tokens=10**5)
            [engine] = server.children()
            os.kill(engine, signal.SIGSTOP)
            watch.wait_for("SERVING", "NOT_SERVING")
            assert 'jengine:engine_up{model_name="mock"} 0.0' in metrics_of(server)
            stream.thread.join(30)
            assert isinstance(stream.error, ServerError) and stream.error.code is grpc.StatusCode.UNAVAILABLE
            assert stream.error.retry_seconds
            watch.wait_for("SERVING", "NOT_SERVING", "SERVING")
            assert not alive(engine)
            assert client.generate([1, 2], max_tokens=2).outputs[0].token_ids == [1, 2]
            watch.close()
        assert "its state is T (stopped); killing it" in server.log


def test_time_in_which_the_server_stood_still_too_does_not_count(tokenizer_folder: Path) -> None:
    """The case of a paused container."""
    with mock_process(tokenizer_folder, server={"watchdog_seconds": 1.5}) as server:
        server.wait_until_ready()
        [engine] = server.children()
        for pid, number, seconds in (
            (engine, signal.SIGSTOP, 0.0),
            (server.pid, signal.SIGSTOP, 2.5),
            (server.pid, signal.SIGCONT, 0.2),  # it looks at its clock before the engine beats
            (engine, signal.SIGCONT, 1.5),
        ):
            os.kill(pid, number)
            time.sleep(seconds)
        assert server.children() == [engine] and "killing it" not in server.log


@pytest.mark.full
def test_a_stopped_engine_is_noticed_within_15_s(tokenizer_folder: Path) -> None:
    """With the default options."""
    with mock_process(tokenizer_folder) as server:
        server.wait_until_ready()
        with grpc.insecure_channel(server.address) as channel:
            watch = HealthWatch(channel)
            watch.wait_for("SERVING")
            os.kill(server.children()[0], signal.SIGSTOP)
            begun = time.monotonic()
            while watch.seen != ["SERVING", "NOT_SERVING"]:
                assert time.monotonic() - begun < 15.0
                time.sleep(0.01)
            print(f"noticed after {time.monotonic() - begun:.1f} s")
            watch.close()


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_stopped_engine_does_not_outlive_its_server(tokenizer_folder: Path) -> None:
    with mock_process(tokenizer_folder) as server:
        server.wait_until_ready()
        [engine] = server.children()
        os.kill(engine, signal.SIGSTOP)
        server.send(signal.SIGKILL)
        try:
            wait_until(lambda: not alive(engine))
        finally:
            if alive(engine):
                os.kill(engine, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_parent_that_died_before_the_call() -> None:
    code = (
        "import sys\nfrom jengine.serving.processes.watchdog import"
        " die_with_parent\ndie_with_parent(int(sys.argv[1]))\nprint('alive')"
    )
    for parent, printed in ((os.getpid(), "alive\n"), (1 if os.getpid() != 1 else 2, "")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(parent)], stdout=subprocess.PIPE, text=True, check=False
        )
        assert (done.stdout, done.returncode) == (printed, 0 if printed else 1)
