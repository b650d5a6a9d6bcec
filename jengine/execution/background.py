"""Loads or compiles the rest of a table's programs in a thread, while the engine serves with the first."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from jengine.execution.kinds import Key

if TYPE_CHECKING:
    from jengine.execution.executor import StagePrograms
    from jengine.execution.programs import Programs
    from jengine.parallel.link import Link

log = logging.getLogger("jengine")


class BackgroundPrograms:
    """Loads or compiles programs. Each can be used as soon as it is there; in an engine of several processes,
    as soon as every process has it and all that precede it in the common order.

    Each program is saved as soon as it is compiled, so an interruption loses at most those in progress. At
    exit, the interpreter waits for those that threads of this process compile, since a compilation cannot be
    stopped safely; commands end without that, see cli.py.

    Args:
        keys: all keys of the table, in order. `programs` already has some.
        ended: called once, when no other program will follow.
    """

    def __init__(
        self,
        programs: Programs | StagePrograms,
        keys: Sequence[Key],
        link: Link,
        *,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        self.keys = [*keys]
        self._programs, self._link, self._on_end = programs, link, ended
        self._obtained = {key: None for key in self.keys if key in programs}  # an ordered set
        self._stopped, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="programs").start()

    @property
    def ready(self) -> int:
        """Number of programs that can be used. It only grows."""
        elsewhere = self._link.reported()
        return len(self._obtained) if elsewhere is None else min(self._prefix, elsewhere)

    def usable(self) -> list[Key]:
        """The keys of these programs, in the order in which they came."""
        elsewhere = self._link.reported()
        return [*self._obtained] if elsewhere is None else self.keys[: min(self._prefix, elsewhere)]

    @property
    def _prefix(self) -> int:
        """Number of keys, counted from the first, whose programs this process has."""
        missing = (at for at, key in enumerate(self.keys) if key not in self._obtained)
        return next(missing, len(self.keys))

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until this process has nothing more to do, at most `timeout` seconds. Returns whether every
        program is ready."""
        self._ended.wait(timeout)
        return self.ready == len(self.keys)

    def prefer(self, keys: Sequence[Key]) -> None:
        """Obtains these first, where other processes compile. Thread-safe."""
        self._programs.prefer(keys)

    def stop(self) -> None:
        """Starts no further program. Returns immediately; may be called repeatedly."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._link.report(self._prefix)
            left = [key for key in self.keys if key not in self._obtained]
            with closing(self._programs.obtain(left, running=self._running)) as obtained:
                for key in obtained:
                    self._obtained[key] = None
                    self._link.report(self._prefix)
                    if not self._running():
                        break
        except Exception as error:
            # once the interpreter ends, neither threads nor futures can be started
            ended = isinstance(error, RuntimeError) and str(error).endswith("shutdown")
            if self._running() and not ended:
                left = [key for key in self.keys if key not in self._obtained]
                log.warning(
                    "%d programs could not be loaded or compiled, the engine continues with the others: %s",
                    len(left),
                    error,
                )
        finally:
            self._on_end()
            self._ended.set()

    def _running(self) -> bool:
        return not self._stopped.is_set() and threading.main_thread().is_alive()
