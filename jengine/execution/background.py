"""Loads or compiles the rest of a table's programs in a thread, while the engine serves with the first
ones.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from jengine.execution.kinds import Key

log = logging.getLogger("jengine")


class ReportLink(Protocol):
    """The part of a link that is needed here; see parallel/link.py."""

    def report(self, count: int) -> None: ...

    def reported(self) -> int | None: ...


class Obtained(Protocol):
    """The part of Programs that is needed here."""

    def obtain(self, keys: Sequence[Key], *, background: bool = False) -> None: ...

    def __contains__(self, key: Key) -> bool: ...


class BackgroundPrograms:
    """Loads or compiles programs in order. The order is the same in every process of an engine.

    A program can be used once every process has it. Each program is saved as soon as it is compiled, so an
    interruption loses at most those in progress. At exit, the interpreter waits for these, since a
    compilation cannot be stopped safely; commands end without that, see cli.py.

    Args:
        keys: all keys of the table, in order. Those that `programs` already has come first.
    """

    def __init__(self, programs: Obtained, keys: Sequence[Key], link: ReportLink, *, threads: int) -> None:
        self.keys = [*keys]
        self._programs, self._link, self._threads = programs, link, threads
        self._count = next((at for at, key in enumerate(self.keys) if key not in programs), len(self.keys))
        self._stopped, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="programs").start()

    @property
    def ready(self) -> int:
        """Number of keys, counted from the first, whose programs can be used."""
        elsewhere = self._link.reported()
        return self._count if elsewhere is None else min(self._count, elsewhere)

    @property
    def complete(self) -> bool:
        return self.ready == len(self.keys)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until this process has nothing more to do, at most `timeout` seconds. Returns whether every
        program is ready."""
        self._ended.wait(timeout)
        return self.complete

    def stop(self) -> None:
        """Starts no further program. Returns immediately; may be called repeatedly."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._link.report(self._count)
            while self._count < len(self.keys) and self._running():
                some = self.keys[self._count : self._count + self._threads]
                self._programs.obtain(some, background=True)
                self._count += len(some)
                self._link.report(self._count)
        except Exception as error:
            # at shutdown no thread can be started
            if self._running() and "interpreter shutdown" not in str(error):
                left = len(self.keys) - self._count
                log.warning(
                    "%d programs could not be loaded or compiled, the engine continues with the others: %s",
                    left,
                    error,
                )
        finally:
            self._ended.set()

    def _running(self) -> bool:
        return not self._stopped.is_set() and threading.main_thread().is_alive()
