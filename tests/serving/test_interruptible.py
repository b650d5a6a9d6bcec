"""Streams read in the main thread, and in others."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from jengine.serving.grpc.client import events_of


class Call:
    """A stream; notes which threads read it."""

    def __init__(self, end: BaseException | None = None) -> None:
        self.readers: set[str] = set()
        self.asked, self.end, self.cancelled = 0, end, threading.Event()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.readers.add(threading.current_thread().name)
        self.asked += 1
        if self.asked <= 3:
            return self.asked
        if self.end is None:
            raise StopIteration
        if isinstance(self.end, TimeoutError):
            assert self.cancelled.wait(60)
        raise self.end


def test_it_yields_what_the_stream_does() -> None:
    call = Call()
    events = events_of(call)
    assert next(events) == 1 and call.asked == 1, "nothing is read ahead"
    assert [*events] == [2, 3] and call.readers == {"stream"}


def test_its_error_is_raised_here() -> None:
    seen = []
    with pytest.raises(ConnectionError, match="gone"):
        seen.extend(events_of(Call(ConnectionError("gone"))))


def test_another_thread_reads_for_itself() -> None:
    call = Call()
    thread = threading.Thread(target=lambda: [*events_of(call)], name="mine")
    thread.start()
    thread.join()
    assert call.readers == {"mine"}


def test_an_interrupt_comes_while_it_waits() -> None:
    """The thread that reads is in the stream's own waiting, and stays there until the call is cancelled."""
    call = Call(TimeoutError())
    main = threading.main_thread().ident
    assert main is not None
    events = events_of(call)
    assert [next(events) for _ in range(3)] == [1, 2, 3]

    def interrupt() -> None:
        while call.asked < 4:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        next(events)
    call.cancelled.set()
