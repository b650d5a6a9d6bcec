"""The team of threads that computes one call on all cores."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pallas_kernels.cpu import native, team

ROOT = Path(__file__).parents[2]
# frame: the address of counters, one a part; each part works a while and counts
COUNT = """
define void @count(i64 %frame, i64 %part, i64 %parts) {
entry:
  %base = inttoptr i64 %frame to ptr
  %place = getelementptr i64, ptr %base, i64 %part
  br label %loop
loop:
  %n = phi i64 [0, %entry], [%next, %loop]
  %old = load volatile i64, ptr %place
  %next = add i64 %n, 1
  %more = icmp ult i64 %next, 200
  br i1 %more, label %loop, label %done
done:
  %new = add i64 %old, %parts
  store i64 %new, ptr %place
  ret void
}
"""
PARTS = 16


@pytest.fixture(scope="module")
def count() -> int:
    return native.compiled(COUNT, "count")[0]


@pytest.fixture
def of_three(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However many cores there are."""
    team.stop()
    monkeypatch.setattr(team, "threads", lambda: 3)
    yield
    team.stop()


def jobs(count: int, number: int, parts: int = PARTS) -> list[int]:
    """How often each part was done."""
    counters = np.zeros(parts, np.int64)
    for _ in range(number):
        team.run(count, counters.ctypes.data, parts)
    return (counters // parts).tolist()


def test_every_part_is_done_once(count: int, of_three: None) -> None:
    for parts in (1, 2, 3, 100):
        assert jobs(count, 500, parts) == [500] * parts


def test_callers_at_once_do_not_wait_for_each_other(count: int, of_three: None) -> None:
    with ThreadPoolExecutor(6) as pool:
        done = [pool.submit(jobs, count, 2000) for _ in range(6)]
        assert [job.result(timeout=120) for job in done] == [[2000] * PARTS] * 6


def test_workers_that_sleep_are_woken_and_use_no_time(count: int, of_three: None) -> None:
    assert jobs(count, 1) == [1] * PARTS
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.2  # two that spin would use 0.8
    slow = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)
    seen = set()

    @slow
    def part(frame: int, part: int, parts: int) -> None:
        seen.add(threading.get_ident())
        time.sleep(0.02)

    address = ctypes.cast(part, ctypes.c_void_p).value
    assert address is not None
    team.run(address, 0, PARTS)
    assert len(seen) == 3


def test_one_thread_needs_no_worker(count: int) -> None:
    team.stop()
    try:
        team.limit(1)
        assert (team.threads(), team.parts()) == (1, 1)
        assert jobs(count, 10) == [10] * PARTS
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("jengine-cpu")]
    finally:
        team.limit(None)
    with pytest.raises(ValueError, match="count=0: at least 1"):
        team.limit(0)


def test_the_limit_may_change(count: int, of_three: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jobs(count, 10) == [10] * PARTS
    monkeypatch.setattr(team, "threads", lambda: 2)
    team.limit(2)
    try:
        assert jobs(count, 10) == [10] * PARTS
        assert len([thread for thread in threading.enumerate() if thread.name.startswith("jengine-cpu")]) == 1
    finally:
        team.limit(None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_computes_too(count: int, of_three: None) -> None:
    """While another thread of its parent has the team; at first alone, then with workers of its own."""
    over = threading.Event()

    def busy() -> None:
        while not over.is_set():
            jobs(count, 10)

    other = threading.Thread(target=busy)
    other.start()
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(team.runner())
    child = os.fork()
    if child == 0:
        counters = np.zeros(PARTS, np.int64)
        run(count, counters.ctypes.data, PARTS)
        os._exit(0 if counters.tolist() == [PARTS] * PARTS and jobs(count, 100) == [100] * PARTS else 1)
    over.set()
    other.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


EXIT = """
import ctypes, sys
from pallas_kernels.cpu import native, team
team.threads = lambda: 3
count = native.compiled(sys.argv[1], "count")[0]
counters = (ctypes.c_int64 * 16)()
for _ in range(50):
    team.run(count, ctypes.addressof(counters), 16)
print(sum(counters))
"""


def test_python_ends_while_workers_spin() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", EXIT, COUNT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{50 * 16 * 16}\n", "")


@pytest.mark.parametrize(("triple", "waits"), [("x86_64-unknown-linux-gnu", "pause"), ("aarch64-unknown-linux-gnu", "isb")])
def test_it_compiles_for_every_processor(triple: str, waits: str) -> None:
    target = native.Target(triple)
    assert waits in native.assembly(team.source(target), target)
