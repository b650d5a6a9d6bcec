"""Progress bars for terminals and notebooks, lines for log files, and reports of progress for programs."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Called in any thread with the current work, such as "compiling", its unit, such as "program", how much is
# done, and of how much.
Report = Callable[[str, str, int, int], None]
PERIOD = 10.0  # seconds between lines of progress_log
Progress = bool | Report  # whether to show bars; a function is called as well


def progress_bar(iterable: Any = None, *, show: Progress, **options: Any) -> Any:
    """A tqdm bar that is removed when it ends.

    Args:
        show: whether to show it, if stderr is a terminal or a notebook's; a function gets its progress, too.
        options: options of tqdm.
    """
    bar = _tqdm(iterable, **options) if show and is_seen() else None
    report = show if callable(show) else None
    return _Bar(bar, iterable, report, options) if bar is None or report else bar


def _tqdm(iterable: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # Jupyter without ipywidgets: bars are text
        from tqdm.auto import tqdm  # with multiprocessing, a tenth of a second
    return tqdm(iterable, leave=False, **options)


def begin(progress: Progress, work: str) -> None:
    """Reports work whose progress is not known."""
    if callable(progress):
        progress(work, "", 0, 0)


class _Bar:
    """A bar that is reported, shown, both or neither. Supports what jengine uses of tqdm.

    Args:
        bar: tqdm's, if it is shown.
    """

    def __init__(self, bar: Any, iterable: Any, report: Report | None, options: dict[str, Any]) -> None:
        self._bar, self._iterable, self._report = bar, iterable, report
        total = options.get("total") or (len(iterable) if hasattr(iterable, "__len__") else 0)
        self._of = options.get("desc", ""), options.get("unit", ""), total
        self.n = 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        with self:
            self._tell()
            for item in self._iterable:
                yield item
                self.update()

    def update(self, count: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(count)
        self.n += count
        self._tell()

    def refresh(self) -> None:
        if self._bar is not None:
            self._bar.n = self.n
            self._bar.refresh()
        self._tell()

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh)

    def write(self, text: str, file: Any) -> None:
        if self._bar is not None:
            self._bar.write(text, file=file)
        else:
            print(text, file=file)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _tell(self) -> None:
        if self._report is not None:
            work, unit, total = self._of
            self._report(work, unit, self.n, total)


def is_seen() -> bool:
    """Whether stderr is a terminal or a notebook's."""
    return sys.stderr.isatty() or _in_notebook()


def _in_notebook() -> bool:
    """Whether this is a notebook's process; others may have imported ipykernel too."""
    kernel: Any = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and bool(kernel.IPKernelApp.initialized())


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
    """Such as "compiling: 12 of 68 programs after 40 s, about 3 min left", if all units take as long."""
    line = f"{doing}: {done} of {total} {unit}s after {duration(seconds)}"
    return f"{line}, about {duration(seconds / done * (total - done))} left" if 0 < done < total else line


def duration(seconds: float) -> str:
    """Such as 40 s, 3 min, 2.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
