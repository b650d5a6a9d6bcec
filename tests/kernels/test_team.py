"""One call computed by several threads of a pool that replaces XLA's."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.llvm import native, team
from pallas_kernels.products.weights import product

# Each part works a while and counts, in the frame's words from the tenth on.
COUNT = """
define void @count(i64 %frame, i64 %part, i64 %parts) {
entry:
  %base = inttoptr i64 %frame to ptr
  %index = add i64 %part, 10
  %place = getelementptr i64, ptr %base, i64 %index
  br label %loop
loop:
  %n = phi i64 [0, %entry], [%next, %loop]
  %old = load volatile i64, ptr %place
  %next = add i64 %n, 1
  %more = icmp ult i64 %next, 500
  br i1 %more, label %loop, label %done
done:
  %new = add i64 %old, 1
  store i64 %new, ptr %place
  ret void
}
"""
PARTS = 16
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
SCHEDULE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64))
PART = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)


class Frame:
    """XLA's call frame, as far as the team reads it."""

    def __init__(self, schedule: Callable[[Any], Any], parts: int = PARTS) -> None:
        self.schedule = SCHEDULE(lambda args: schedule(TASK(args[3])))
        self.api = np.zeros(18, np.int64)
        self.api[17] = ctypes.cast(self.schedule, ctypes.c_void_p).value
        self.words = np.zeros(10 + parts, np.int64)
        self.words[2] = self.api.ctypes.data

    def run(self, function: int, times: int = 1) -> list[int]:
        """Number of times that each part was run."""
        run = PART(team.runner())
        for _ in range(times):
            run(function, self.words.ctypes.data, len(self.words) - 10)
        return self.words[10:].tolist()


@pytest.fixture(scope="module")
def count() -> int:
    return native.compiled(lambda: COUNT, "count")[0]


@pytest.fixture(autouse=True)
def of_three(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uses three threads for any number of cores."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
        patch.delenv("NPROC", raising=False)
        yield
    team.runner()


@pytest.fixture
def pool() -> Iterator[Callable[[Any], None]]:
    with ThreadPoolExecutor(2) as threads:
        yield lambda task: threads.submit(task, None) and None


def test_every_part_is_done_once(count: int, pool: Any) -> None:
    for parts in (1, 2, 3, 100):
        assert Frame(pool, parts).run(count, 200) == [200] * parts


def test_helpers_help(pool: Any) -> None:
    seen, all_here = set(), threading.Barrier(3)

    @PART
    def part(frame: int, part: int, parts: int) -> None:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            all_here.wait(60)  # three threads must each have taken parts

    Frame(pool).run(ctypes.cast(part, ctypes.c_void_p).value or 0)
    assert len(seen) == 3


def test_a_thread_takes_consecutive_parts_and_few_at_the_end(pool: Any) -> None:
    owners, others = [0] * PARTS, threading.Event()

    @PART
    def part(frame: int, part: int, parts: int) -> None:
        owners[part] = threading.get_ident()
        if part == 0:
            others.wait(60)
        if part == PARTS - 1:
            others.set()

    Frame(pool).run(ctypes.cast(part, ctypes.c_void_p).value or 0)
    first = owners.index(next(owner for owner in owners if owner != owners[0]))
    # two thirds of a third; helpers took the others meanwhile
    assert first == 2 * PARTS // 9 and owners[0] not in owners[first:]


def test_helpers_that_never_come_or_come_late_change_nothing(count: int) -> None:
    tasks: list[Any] = []
    assert Frame(tasks.append).run(count, 5) == [5] * PARTS
    assert len(tasks) == 10
    for task in tasks:
        task(None)
    assert Frame(lambda task: task(None)).run(count, 5) == [5] * PARTS  # in the caller's own thread


def test_callers_at_once_do_not_wait_for_each_other(count: int, pool: Any) -> None:
    with ThreadPoolExecutor(6) as callers:
        done = [callers.submit(lambda: Frame(pool).run(count, 1000)) for _ in range(6)]
        assert [job.result(timeout=120) for job in done] == [[1000] * PARTS] * 6


def test_one_thread_asks_for_no_help(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setenv("NPROC", "1")
        assert (team.threads(), team.parts()) == (1, 1)
        assert Frame(asked.append).run(count, 10) == [10] * PARTS
    assert not asked


@pytest.mark.parametrize(("pool", "threads"), [("2", 2), ("8", 3), ("0", 3), ("all", 3)])
def test_there_are_no_more_helpers_than_xla_has_threads(
    pool: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPROC", pool)
    assert team.threads() == threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_process_forked_during_a_job_computes_too(count: int, pool: Any) -> None:
    children = []

    @PART
    def part(frame: int, part: int, parts: int) -> None:
        if part == 0:
            children.append(os.fork())
            if children[0] == 0:
                os._exit(0 if Frame(lambda task: None).run(count, 10) == [10] * PARTS else 1)

    Frame(pool).run(ctypes.cast(part, ctypes.c_void_p).value or 0)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0


def test_xla_has_a_pool_where_it_is_looked_for() -> None:
    """Uses the real interface: a wrong offset in its table would crash, or compute on one thread."""
    x, weight = jnp.ones((64, 64)), jnp.ones((512, 64))
    run = jax.jit(product).lower(x, weight).compile()
    for _ in range(200):
        assert float(run(x, weight)[0, 0]) == 64


@pytest.mark.parametrize(
    ("triple", "waits"), [("x86_64-unknown-linux-gnu", "pause"), ("aarch64-unknown-linux-gnu", "isb")]
)
def test_it_compiles_for_every_processor(triple: str, waits: str) -> None:
    target = native.Target(triple)
    assert waits in native.assembly(team.source(target), target)
