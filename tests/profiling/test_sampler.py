"""The sampler sees threads in stacks, at locks and in system calls. They wait until it has seen them; no time
is measured."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jengine.insight.profiling.capture import heap_growth, resident_parts
from jengine.insight.profiling.sampler import ThreadSampler, awaited_lock, call_now

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


class Account:
    """An object with a lock that two threads acquire."""

    def __init__(self) -> None:
        self._lock, self.condition = threading.Lock(), threading.Condition()
        self.taken, self.done = threading.Event(), threading.Event()

    def hold(self) -> None:
        with self._lock:
            self.taken.set()
            self.done.wait(60)

    def want(self) -> None:
        with self._lock:
            pass

    def acquire(self) -> None:
        self._lock.acquire()
        self._lock.release()

    def notice(self) -> None:
        with self.condition:
            self.condition.wait_for(self.done.is_set, 60)


@contextmanager
def threads(account: Account, *names: str) -> Iterator[None]:
    made = [threading.Thread(target=getattr(account, name), name=f"to-{name}") for name in names]
    for thread in made:
        thread.start()
        if thread is made[0] and names[0] == "hold":
            assert account.taken.wait(60)
    try:
        yield
    finally:
        account.done.set()
        with account.condition:
            account.condition.notify_all()
        for thread in made:
            thread.join()


@contextmanager
def sampling() -> Iterator[ThreadSampler]:
    sampler = ThreadSampler(200)
    starter = threading.Thread(target=sampler.start)
    starter.start()
    starter.join()
    try:
        yield sampler
    finally:
        sampler.stop()


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["want", "acquire"])
def test_a_lock_and_who_holds_it(way: str) -> None:
    account = Account()
    with sampling() as sampler, threads(account, "hold", way):
        wait_for(lambda: sampler.samples > 20)
    [wait] = [wait for wait in sampler.lock_waits if wait.thread == f"to-{way}"]
    assert wait.lock == "self._lock" and wait.seconds > 0.0
    assert wait.where.startswith(f"Account.{way} (") and "test_sampler.py:" in wait.where
    assert wait.holder.startswith("to-hold, in ")


def test_to_wait_for_news_is_to_wait_for_no_lock() -> None:
    account = Account()
    with sampling() as sampler, threads(account, "notice"):
        wait_for(lambda: sampler.samples > 10)
    assert not sampler.lock_waits
    stacks = {flame.thread: flame for flame in sampler.flames()}
    assert "profile-sampler" not in stacks and stacks["to-notice"].samples >= 10
    assert any(
        "Account.notice (tests/profiling/test_sampler.py:" in stack for stack in stacks["to-notice"].stacks
    )


def test_what_is_no_lock() -> None:
    def waits(path: str = "x") -> str:
        return awaited_lock(sys._getframe())

    assert waits() == ""
    with pytest.raises(FileNotFoundError), open("/nowhere/at all"):
        pass


@LINUX
def test_system_calls_now(tmp_path: Path) -> None:
    """A thread that reads an empty pipe."""
    reading, writing = os.pipe()
    thread = threading.Thread(target=os.read, args=(reading, 1))
    thread.start()
    read = 63 if platform.machine() == "aarch64" else 0
    assert thread.native_id is not None
    wait_for(lambda: call_now(thread.native_id or 0) == read)
    os.write(writing, b"x")
    thread.join()
    os.close(reading)
    os.close(writing)


def test_the_heap() -> None:
    kept: list[bytes] = []

    def wait(seconds: float) -> None:
        """Allocates between the snapshots, which the longer wait is."""
        if seconds > 1.0:
            kept.extend(bytes(1000) for _ in range(1000))

    growth, _ = heap_growth(5.0, wait)
    assert kept and growth[0].where.startswith("tests/profiling/test_sampler.py:")
    assert growth[0].bytes >= 1_000_000


@LINUX
def test_memory_by_part() -> None:
    parts = resident_parts({"weights": 1 << 20}, on_devices=False)
    assert parts["weights"] == 1 << 20 and parts["files: libraries, mapped weights"] > 1 << 20
    assert "other" in parts
    assert "weights" not in resident_parts({"weights": 1 << 20}, on_devices=True)
