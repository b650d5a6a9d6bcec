"""Calls in a thread, each with a time limit."""

from __future__ import annotations

import threading
import time

import pytest

from jengine.base.errors import JengineError
from jengine.text.mask_thread import MaskThread

LIMIT = 0.1


def spin(seconds: float) -> None:
    """Uses CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def named() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "token-masks"}


def test_all_calls_are_made_in_order() -> None:
    made: list[int] = []
    thread = MaskThread(LIMIT)
    for _ in range(3):
        assert thread.run([lambda i=i: made.append(i) for i in range(5)]) == {}  # type: ignore[misc]
    assert made == [0, 1, 2, 3, 4] * 3 and thread.run([]) == {}


def test_failures_are_told_by_index() -> None:
    failures = MaskThread(LIMIT).run([lambda: None, lambda: 1 // 0, lambda: None, lambda: [][0]])
    assert {i: type(error) for i, error in failures.items()} == {1: ZeroDivisionError, 3: IndexError}


def test_a_slow_call_fails_alone() -> None:
    before, made = named(), []
    thread = MaskThread(LIMIT)
    failures = thread.run(
        [lambda: made.append(0), lambda: spin(20 * LIMIT), lambda: made.append(2), lambda: spin(20 * LIMIT)]
    )
    assert {i: type(error) for i, error in failures.items()} == {
        1: JengineError,
        3: JengineError,
    } and made == [0, 2]
    assert thread.run([lambda: made.append(4)]) == {} and made == [0, 2, 4]
    until = time.monotonic() + 30
    while len(named() - before) > 1:  # those that were given up end by themselves
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="the limit is of wall-clock time here")
def test_a_busy_machine_fails_no_call() -> None:
    """Time without computation does not count."""
    assert MaskThread(0.05).run([lambda: time.sleep(0.3)]) == {}


def test_the_thread_ends_with_its_owner() -> None:
    before = named()
    thread = MaskThread(LIMIT)
    thread.run([lambda: None])
    [own] = named() - before
    del thread
    own.join(10)
    assert not own.is_alive()
