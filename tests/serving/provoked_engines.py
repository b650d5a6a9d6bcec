"""A model's engine in an engine process with additional problems, so that a profile can detect them."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from typing import Any

from jengine.serving.processes.engines import WarmEngine, model_engine

OBJECTS = 400_000  # that the garbage collector has to look at
LINES, EVERY = 4000, 40  # of the log, and after how many steps
HELD, FREE = 0.15, 0.3  # seconds


class Provoked:
    """The engine, whose steps also acquire a lock and write a log."""

    def __init__(self, engine: Any, causes: list[str]) -> None:
        self._engine, self._causes, self._lock, self._steps = engine, causes, threading.Lock(), 0
        self._log = os.open(tempfile.gettempdir(), os.O_WRONLY | os.O_TMPFILE) if "log" in causes else 0
        threads = {"gc": collect_for_ever, "lock": self._hold_for_ever}
        for cause in threads.keys() & {*causes}:
            threading.Thread(target=threads[cause], name=f"provokes-{cause}", daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        if "lock" in self._causes:
            with self._lock:
                pass
        self._steps += 1
        if self._log and self._steps % EVERY == 0:
            self._write_log()
        return self._engine.step()

    def _write_log(self) -> None:
        for number in range(LINES):
            os.write(self._log, b"step %6d: all is well, and far too much is said about it\n" % number)
        os.fsync(self._log)

    def _hold_for_ever(self) -> None:
        while True:
            with self._lock:
                time.sleep(HELD)
            time.sleep(FREE)


def collect_for_ever() -> None:
    time.sleep(0.5)  # the engine process freezes what there is when it has started
    kept = [[] for _ in range(OBJECTS)]  # type: ignore[var-annotated]
    while kept:
        gc.collect()
        time.sleep(0.25)


def provoked(causes: list[str], **options: Any) -> WarmEngine:
    """causes: of gc, log, lock."""
    made = model_engine(**options)
    return made._replace(engine=Provoked(made.engine, causes))  # type: ignore[arg-type]
