"""Progress of long work: a bar on a terminal, lines in a log file."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jengine.base.progress import is_seen, progress_bar

PERIOD = 10.0  # seconds between lines


@contextmanager
def progress_log(
    total: int, *, doing: str, unit: str, show: bool, period: float = PERIOD
) -> Iterator[Callable[[], None]]:
    """A context whose value is called after each of `total` units.

    On a terminal or in a notebook it shows a bar. Elsewhere it writes a line to stderr every `period`
    seconds, also while nothing is finished.

    Args:
        doing: the work, such as "compiling"; unit: one of these, such as "program".
    """
    if not show or is_seen():
        with progress_bar(total=total, desc=doing, unit=unit, show=show) as bar:
            yield lambda: bar.update()
        return
    done, start, ended = 0, time.monotonic(), threading.Event()

    def count() -> None:
        nonlocal done
        done += 1

    def write() -> None:
        while not ended.wait(period):
            print(
                progress_line(doing, unit, done, total, time.monotonic() - start), file=sys.stderr, flush=True
            )

    thread = threading.Thread(target=write, name="progress", daemon=True)
    thread.start()
    try:
        yield count
    finally:
        ended.set()
        thread.join()


def progress_line(doing: str, unit: str, done: int, total: int, seconds: float) -> str:
    """Such as "compiling: 12 of 68 programs after 40 s, about 3 min left". The estimate assumes that all
    units take as long.
    """
    line = f"{doing}: {done} of {total} {unit}s after {duration(seconds)}"
    return f"{line}, about {duration(seconds / done * (total - done))} left" if 0 < done < total else line


def duration(seconds: float) -> str:
    """Such as 40 s, 3 min, 2.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
