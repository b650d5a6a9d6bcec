"""Starts an engine in place of one that has ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from jengine.serving.processes.back_off import BackOff

log = logging.getLogger("jengine.serving")


class Startable(Protocol):
    """The part of an engine that is needed here; see EngineProcess."""

    def start(self) -> None: ...

    def quit(self, wait: bool = True) -> None: ...


def start_again[E: Startable](
    name: str,
    error: BaseException | None,
    lived: float,
    make: Callable[[], E],
    enter: Callable[[E], None],
    *,
    back_off: BackOff,
    stop: threading.Event,
) -> bool:
    """Starts engines until one is entered, or `stop` is set. Engines that do not start or are refused are
    ended.

    Args:
        name: of what has ended, for the log.
        error: why it has ended, `lived` seconds after it was ready.
        enter: puts a started engine to its place. It raises if the engine is refused, such as for its limits.

    Returns:
        Whether an engine was entered.
    """
    while True:
        seconds = back_off.after(lived)
        log.error("%s: %s; starting another in %.1f s", name, error, seconds)
        if stop.wait(seconds):
            return False
        engine = make()
        try:
            engine.start()
            if stop.is_set():
                engine.quit(wait=False)
                return False
            enter(engine)
        except Exception as wrong:  # whatever it is, the others answer, and the next may start
            engine.quit(wait=False)
            error, lived = wrong, 0.0
        else:
            return True
