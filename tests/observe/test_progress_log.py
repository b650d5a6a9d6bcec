"""Progress of long work without a terminal: lines, also while nothing is finished."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from jengine.base.progress import duration, progress_line, progress_log


class Lines(io.StringIO):
    """A log that can be awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        size = super().write(text)
        self.written.set()
        return size


def test_lines_of_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Lines()
    monkeypatch.setattr(sys, "stderr", log)
    with progress_log(3, doing="compiling", unit="program", show=True, period=0.01) as count:
        assert log.written.wait(60), "a line before the first program"
        count()
        count()
        log.written.clear()
        assert log.written.wait(60)
        log.written.clear()
        assert log.written.wait(60)
    lines = log.getvalue().splitlines()
    assert lines[0] == "compiling: 0 of 3 programs after 0 s"
    assert lines[-1] == "compiling: 2 of 3 programs after 0 s, about 0 s left"
    assert "progress" not in [thread.name for thread in threading.enumerate()]


def test_nothing_is_written_if_it_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Lines()
    monkeypatch.setattr(sys, "stderr", log)
    with progress_log(3, doing="compiling", unit="program", show=False, period=0.001) as count:
        count()
        assert not log.written.wait(0.05)


def test_the_estimate() -> None:
    assert (
        progress_line("compiling", "program", 12, 68, 40)
        == "compiling: 12 of 68 programs after 40 s, about 3 min left"
    )
    assert progress_line("compiling", "program", 68, 68, 240) == "compiling: 68 of 68 programs after 4 min"
    assert [duration(seconds) for seconds in (0.4, 119, 150, 9000)] == ["0 s", "119 s", "2 min", "2.5 h"]
