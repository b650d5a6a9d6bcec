"""The kernel's figures about processors: as its files say, and as this process really ran."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from jengine.insight.explanations.finding import Processors
from jengine.insight.recording.machine import TICK, MachineClock


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_figures_of_files(tmp_path: Path) -> None:
    thread, second = f"proc__self__task__{os.getpid()}__schedstat", f"{TICK}"
    clock = MachineClock(tmp_path)
    write(
        tmp_path,
        **{thread: "1000000000 500000000 7\n"},
        proc__stat=f"cpu  {second} {second}0 {second} 9 9 0 0 {second}00 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n",
        proc__pressure__cpu="some avg10=1.0 avg60=2.0 avg300=3.0 total=2500000\nfull avg10=0.0 total=7\n",
        proc__self__cgroup="3:cpu,cpuacct:/a\n0::/\n",
    )
    write(tmp_path / "sys/fs/cgroup/cpu/a", **{"cpu.stat": "nr_periods 4\nthrottled_time 3000000000\n"})
    first = clock.sample(10.0, os.getpid(), 3, 9)
    assert (first.at, first.ran, first.queued, first.loop_ran, first.loop_queued) == (
        10.0,
        1.0,
        0.5,
        1.0,
        0.5,
    )
    assert (first.normal, first.low, first.stolen) == (2.0, 10.0, 100.0)
    assert (first.throttled, first.pressure, first.programs_ready, first.programs) == (3.0, 2.5, 3, 9)
    write(tmp_path, **{thread: "1500000000 2000000000 9\n"})
    last = clock.sample(12.0, os.getpid(), 9, 9)
    assert (last.ran, last.queued) == (1.5, 2.0)
    used = Processors.between([first, last], 10.0, 12.0)
    assert used is not None and used.queued == 0.75 and used.others == 0.0 and used.compiling == 1.0
    (tmp_path / "proc/self/task" / str(os.getpid()) / "schedstat").unlink()  # a thread has ended
    assert clock.sample(13.0, 0, 9, 9).ran == -1.0


def test_systems_without_these_files(tmp_path: Path) -> None:
    clock = MachineClock(tmp_path)
    first, last = clock.sample(0.0, 0, 1, 1), clock.sample(5.0, 0, 1, 1)
    assert (first.ran, first.normal, first.pressure, first.throttled) == (-1.0, -1.0, -1.0, 0.0)
    used = Processors.between([first, last], 1.0, 4.0)
    assert used is not None and not used.known
    assert (used.queued, used.others, used.low, used.rate("pressure"), used.rate("stolen")) == (0,) * 5


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_thread_that_computes_is_counted_and_one_of_low_priority_is_not() -> None:
    clock = MachineClock()
    if (before := clock.sample(0.0, threading.get_native_id(), 0, 0)).ran < 0:
        pytest.skip("the kernel does not count")

    def compute(seconds: float, nice: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        ended = time.thread_time() + seconds
        while time.thread_time() < ended:
            pass
        seen.set()
        done.wait()

    for nice in (0, 10):
        seen, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=compute, args=(0.2, nice))
        thread.start()
        seen.wait()
        after = clock.sample(1.0, threading.get_native_id(), 0, 0)
        done.set()
        thread.join()
        assert (after.ran - before.ran >= 0.2) == (nice == 0), nice
        before = clock.sample(2.0, threading.get_native_id(), 0, 0)
