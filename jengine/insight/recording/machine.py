"""The kernel's figures about processors and memory, and pauses by Python's garbage collector."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Literal

from jengine.base.host_memory import ROOT, available_memory, control_groups, field_of, text_of
from jengine.insight.recording.records import Machine, Memory, Pause

TICK = os.sysconf("SC_CLK_TCK")  # a second, as /proc/stat counts
NOTED = 1e-3  # minimum seconds of a pause that is recorded separately
KEPT = 1024


class MachineClock:
    """Samples these figures for this process. Thread-safe."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root, self._lock = root, threading.Lock()
        self._threads: dict[str, tuple[int, int]] = {}  # nanoseconds that each ran and was queued
        self._ran = self._queued = 0

    def sample(self, now: float, loop: int, programs_ready: int, programs: int) -> Machine:
        """The current figures; takes about ten microseconds for each thread.

        Args:
            loop: native id of the thread that steps the engine; 0: there is none yet.
            programs_ready, programs: see Machine.
        """
        with self._lock:
            known = self._count()
            loop_ran, loop_queued = self._threads.get(str(loop), (0, 0))
            ran, queued = self._ran, self._queued
        busy, low, stolen = self._of_machine()
        return Machine(
            at=now,
            processors=os.cpu_count() or 1,
            ran=ran / 1e9 if known else -1.0,
            queued=queued / 1e9 if known else -1.0,
            loop_ran=loop_ran / 1e9,
            loop_queued=loop_queued / 1e9,
            normal=busy,
            low=low,
            stolen=stolen,
            throttled=self._throttled(),
            pressure=self._pressure(),
            switches=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
            programs_ready=programs_ready,
            programs=programs,
        )

    def _count(self) -> bool:
        """Adds what threads of usual priority ran and waited since the last call; False: unknown."""
        folder, before, self._threads = f"{self._root}/proc/self/task", self._threads, {}
        usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
        try:
            threads = os.listdir(folder)
        except OSError:
            return False
        for thread in threads:
            try:
                ran, queued, _ = map(int, text_of(f"{folder}/{thread}/schedstat").split())
                low = os.getpriority(os.PRIO_PROCESS, int(thread)) > usual
            except (OSError, ValueError):  # it has just ended, or the kernel does not count
                continue
            self._threads[thread] = ran, queued
            had_run, had_queued = before.get(thread, (0, 0))
            if not low and ran >= had_run:  # otherwise it is another thread with the same id
                self._ran += ran - had_run
                self._queued += queued - had_queued
        return bool(self._threads)

    def _of_machine(self) -> tuple[float, float, float]:
        """Seconds of all processors: with processes of usual and of low priority, and of a hypervisor."""
        words = text_of(self._root / "proc/stat").partition("\n")[0].split()[1:9]
        if len(words) < 8:
            return -1.0, -1.0, -1.0
        user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, words)
        return (user + system + interrupts + soft_interrupts) / TICK, nice / TICK, stolen / TICK

    def _throttled(self) -> float:
        """Seconds for which this process's container had used up its quota."""
        seconds = 0.0
        for group, version in control_groups("cpu", self._root):
            name, unit = ("throttled_usec", 1e-6) if version == 2 else ("throttled_time", 1e-9)
            seconds = max(seconds, (field_of(group / "cpu.stat", name) or 0) * unit)
        return seconds

    def _pressure(self) -> float:
        """Seconds for which some process of the machine waited for a processor."""
        first = text_of(self._root / "proc/pressure/cpu").partition("\n")[0]
        total = first.rpartition("total=")[2]
        return int(total) / 1e6 if total.isdigit() else -1.0


def memory(now: float) -> Memory:
    """Current memory; takes less than a millisecond. Without /proc, resident is the maximum so far."""
    try:
        with open("/proc/self/statm", "rb") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        resident = peak if sys.platform == "darwin" else peak * 1024
    return Memory(now, resident, available_memory())


class GarbagePauses:
    """Statistics of garbage collections.

    Attributes:
        seconds: total of all collections.
        by_generation: (number of collections, seconds) of each generation.
        longest: the most recent ones that took at least NOTED seconds.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.by_generation = ((0, 0.0),) * 3
        self.longest: deque[Pause] = deque(maxlen=KEPT)
        self._begun = 0.0

    def __call__(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        """The callback for gc.callbacks. Collections do not nest."""
        if phase == "start":
            self._begun = time.perf_counter()
            return
        seconds, generation = time.perf_counter() - self._begun, info["generation"]
        self.seconds += seconds
        totals = [*self.by_generation]
        totals[generation] = totals[generation][0] + 1, totals[generation][1] + seconds
        self.by_generation = (totals[0], totals[1], totals[2])
        if seconds >= NOTED:
            thread = threading.current_thread().name
            self.longest.append(Pause(self._begun, seconds, generation, info["collected"], thread))


_pauses = GarbagePauses()
_lock = threading.Lock()


def garbage_pauses() -> GarbagePauses:
    """Statistics of this process, since the first call."""
    with _lock:
        if _pauses not in gc.callbacks:
            gc.callbacks.append(_pauses)
    return _pauses
