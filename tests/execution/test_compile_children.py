"""Processes that compile: what they return, and what happens when they end."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import jax
import pytest

from jengine.execution import compile_children
from jengine.execution import programs as programs_module
from jengine.execution.compile_children import (
    NICENESS,
    CompileChildren,
    Compiled,
    CompileFailed,
    Job,
    children_count,
)
from jengine.execution.kinds import Key
from jengine.execution.program_store import unpacked
from jengine.execution.programs import Programs, compile_one, memory_of, open_cache
from tests.execution.specs import make_spec

PATIENCE = 120.0  # seconds, of a busy machine
GIB = 1 << 30
JOB = Job("a spec", b"")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """Scripted processes, and what they were asked for: [process, key] each."""
    monkeypatch.setattr(compile_children, "MODULE", "tests.execution.scripted_child")
    monkeypatch.setenv("SCRIPTED_CHILD", str(tmp_path))
    file = tmp_path / "log"
    return lambda: [line.split(" ", 1) for line in file.read_text().splitlines()] if file.exists() else []


def data(children: CompileChildren, key: str) -> bytes:
    return children.compile(JOB, key).result(PATIENCE).data


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def gone(process: str) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_programs_are_compiled_in_the_order_in_which_they_were_asked_for(log: Any) -> None:
    children = CompileChildren(1)
    children.begin(JOB, ["first", "second", "third"])
    assert data(children, "fourth") == b"fourth" and data(children, "second") == b"second"
    assert [key for _, key in log()] == ["first", "second", "third", "fourth"], "each once"
    assert len({process for process, _ in log()}) == 1
    children.close()
    children.close()
    until(lambda: gone(log()[0][0]))
    with pytest.raises(CompileFailed, match="have ended"):
        data(children, "fifth")


def test_a_process_that_ends_is_replaced_and_its_program_compiled_again(
    log: Any, caplog: pytest.LogCaptureFixture
) -> None:
    children = CompileChildren(1)
    assert data(children, "dies once") == b"dies once"
    assert "another one tries again: with SIGKILL: dies once: out of memory" in caplog.text
    with pytest.raises(CompileFailed, match="ended twice, with SIGKILL: dies: out of memory"):
        data(children, "dies")
    assert data(children, "next") == b"next" and children.works
    assert [key for _, key in log()] == ["dies once", "dies once", "dies", "dies", "next"]
    children.close()


def test_a_program_that_fails_fails_alone(log: Any) -> None:
    children = CompileChildren(1)
    with pytest.raises(CompileFailed, match="out of registers"):
        data(children, "fails")
    assert data(children, "next") == b"next" and len({process for process, _ in log()}) == 1
    children.close()


def test_close_ends_what_is_being_compiled(log: Any) -> None:
    children = CompileChildren(2)
    hanging, waiting = [children.compile(JOB, "hangs") for _ in range(2)], children.compile(JOB, "next")
    until(lambda: len(log()) == 2)
    children.close()
    for result in (*hanging, waiting):
        with pytest.raises(CompileFailed, match="have ended"):
            result.result(PATIENCE)
    until(lambda: all(gone(process) for process, _ in log()))


def test_what_is_not_needed_any_more_is_left_out(log: Any) -> None:
    children = CompileChildren(1)
    hanging = children.compile(JOB, "hangs")
    until(log)
    children.begin(JOB, ["early"])
    [task] = children._early.values()
    children.forget()
    with pytest.raises(CancelledError):
        task.result.result(PATIENCE)
    children.close()
    assert isinstance(hanging.exception(PATIENCE), CompileFailed) and len(log()) == 1


def test_where_no_process_can_start_programs_fail_with_one_warning(
    log: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "refuse").touch()
    children = CompileChildren(2)
    results = [children.compile(JOB, key) for key in ("one", "two", "three")]
    assert all(isinstance(result.exception(PATIENCE), CompileFailed) for result in results)
    assert not children.works and log() == []
    assert caplog.text.count("no process can be started") == 1
    assert "with exit status 1: no room for another process" in caplog.text

    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    children = CompileChildren(3)  # fewer programs than processes
    assert isinstance(children.compile(JOB, "one").exception(PATIENCE), CompileFailed)
    assert not children.works and "absent" in caplog.text


def test_a_start_without_other_processes_compiles_by_itself(
    log: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs_module, "program_keys", lambda spec: ["allocate-counts", "count"])
    (tmp_path / "refuse").touch()
    spec, children = make_spec(), CompileChildren(2)
    cache = open_cache(spec, tmp_path, GIB)
    programs = Programs(spec, cache, threads=1, progress=False, children=children)
    assert not children.works and programs.compiled == 2 and "count" in programs


def test_while_steps_run_processes_take_only_idle_processors(log: Any) -> None:
    children = CompileChildren(1)
    assert data(children, "first") == b"first"
    process = children._children[0]._process.pid
    lower = min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)
    assert os.getpriority(os.PRIO_PROCESS, process) == lower
    assert os.sched_getscheduler(process) == os.SCHED_OTHER
    children.step_aside()
    with pytest.raises(CompileFailed):
        data(children, "dies")
    assert data(children, "next") == b"next"
    later = children._children[0]._process.pid
    assert later != process and os.sched_getscheduler(later) == os.SCHED_IDLE
    children.close()


def test_processes_are_bounded_by_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_children, "CORES", 16)
    assert children_count(16, 128 * GIB) == 14 and children_count(4, 128 * GIB) == 4
    assert children_count(16, 12 * GIB) == 6 and children_count(16, 2 * GIB) == 1
    assert children_count(16, GIB) == 0
    monkeypatch.setattr(compile_children, "CORES", 2)
    assert children_count(2, 128 * GIB) == 1


def test_processes_end_with_a_killed_parent(log: Any) -> None:
    """Also if a process that was forked from it keeps its sockets open, and while they compile."""
    script = """
import os, sys, time
from jengine.execution import compile_children
from jengine.execution.compile_children import Job
children = compile_children.CompileChildren(1)
result = children.compile(Job("a spec", b""), "count")
while not children._children:  # until it has been started: a fork meanwhile would hold its start's pipe open
    time.sleep(0.01)
if os.fork() == 0:
    time.sleep(1000)
result.exception()
process = children._children[0]._process.pid
print(process, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            process = parent.stdout.readline().strip()
            assert not gone(process)
        finally:
            parent.kill()
        until(lambda: gone(process))


@pytest.fixture(scope="module")
def compiled() -> tuple[Compiled, BaseException | None]:
    """A program that another process has compiled, and why it refuses a spec that would differ there."""
    spec, children = make_spec(), CompileChildren(1)
    result = children.compile(Job.of(spec, None), "count").result(PATIENCE)
    other = Job.of(dataclasses.replace(spec, max_slots=15), None)
    data = other.data.replace(b"max_slots", b"max_slotz", 1)
    refused = children.compile(Job("another", data), "count").exception(PATIENCE)
    children.close()
    return result, refused


def test_a_program_of_another_process_is_the_same(compiled: tuple[Compiled, Any]) -> None:
    spec, (result, _) = make_spec(), compiled
    here = compile_one(spec, "count").program
    there = unpacked(result.data, spec.mesh.devices.flatten().tolist())
    assert result.memory == memory_of(here)
    counts = jax.numpy.zeros(spec.counts.shape, spec.counts.dtype)
    chunk = jax.numpy.arange(here.args_info[0][1].shape[0], dtype="int32") % 7
    assert (here(counts + 0, chunk) == there(counts + 0, chunk)).all()


def test_a_process_refuses_what_it_would_compile_differently(compiled: tuple[Any, Any]) -> None:
    assert "this process cannot compile them" in str(compiled[1])


class _Refusing:
    """Processes that work, but whose programs this one cannot use."""

    works, target = True, None

    def compile(self, job: Job, key: Key) -> Future[Compiled]:
        result = Future[Compiled]()
        result.set_exception(CompileFailed("another device"))
        return result


def test_if_no_program_of_other_processes_can_be_used_this_one_compiles() -> None:
    """Also while steps run: otherwise the engine would keep its first programs for ever."""
    children: Any = _Refusing()
    programs = Programs(make_spec(), None, threads=1, progress=False, first=["count"], children=children)
    assert [*programs.obtain(["allocate"], running=lambda: True)] == ["allocate"]
    assert "count" in programs and programs.compiled == 2
