"""The rest of a table's programs, got by a thread while the engine already serves with the first ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from jengine.execution.programs import Key, Programs

log = logging.getLogger("jengine")


class Reports(Protocol):
    """What a link does here, see parallel/link.py."""

    def report(self, count: int) -> None: ...

    def reported(self) -> int | None: ...


class BackgroundPrograms:
    """Loads or compiles programs in their order, which is the same in every process of an engine.

    Each can be used as soon as every process has it. What has been compiled is saved at once, so an interrupted process loses at most
    the programs it was compiling. The interpreter's exit waits for these: a compilation cannot be stopped safely.

    Args:
        keys: all of the table, in order; those that the programs have already come first.
    """

    def __init__(self, programs: Programs, keys: Sequence[Key], link: Reports, *, threads: int) -> None:
        self.keys = [*keys]
        self._programs, self._link, self._threads = programs, link, threads
        self._count = next((at for at, key in enumerate(self.keys) if key not in programs), len(self.keys))
        self._stopped, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="programs").start()

    @property
    def ready(self) -> int:
        """How many of the keys can be used: the first ones."""
        elsewhere = self._link.reported()
        return self._count if elsewhere is None else min(self._count, elsewhere)

    @property
    def complete(self) -> bool:
        return self.ready == len(self.keys)

    def wait(self, timeout: float | None = None) -> bool:
        """Until this process has nothing more to do, at most `timeout` seconds. Returns whether every program is ready."""
        self._ended.wait(timeout)
        return self.complete

    def stop(self) -> None:
        """Begin no other program. Returns at once; may be called again."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._link.report(self._count)
            while self._count < len(self.keys) and self._goes_on():
                some = self.keys[self._count : self._count + self._threads]
                self._programs.obtain(some, background=True)
                self._count += len(some)
                self._link.report(self._count)
        except Exception as error:
            if self._goes_on() and "interpreter shutdown" not in str(error):  # then no thread can be started any more
                left = len(self.keys) - self._count
                log.warning("%d programs could not be made ready, the engine goes on with the others: %s", left, error)
        finally:
            self._ended.set()

    def _goes_on(self) -> bool:
        return not self._stopped.is_set() and threading.main_thread().is_alive()
