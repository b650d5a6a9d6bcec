"""The request log: lines are written by a thread, dropped rather than waited for, and follow log rotation."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path

import pytest

from jengine import InvalidArgument
from jengine.serving import logs
from jengine.serving.logs import RequestLog
from tests.serving.leaks import wait_until


def test_lines_are_json_and_appended(tmp_path: Path) -> None:
    file = tmp_path / "log"
    for number in range(2):
        log = RequestLog(file)
        log.write({"id": f"é\n{number}"})
        log.close()
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == [
        {"id": "é\n0"},
        {"id": "é\n1"},
    ]
    assert not [thread for thread in threading.enumerate() if thread.name == "request-log"]


def test_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    log = RequestLog("-")
    log.write({"id": 1})
    log.close()
    assert capsys.readouterr().out == '{"id": 1}\n' and not sys.stdout.closed


def test_rotation(tmp_path: Path) -> None:
    file, moved = tmp_path / "log", tmp_path / "log.1"
    log = RequestLog(file)
    log.write({"id": 1})
    wait_until(lambda: file.exists() and file.read_text() != "")
    file.rename(moved)
    log.write({"id": 2})
    log.close()
    assert (moved.read_text(), file.read_text()) == ('{"id": 1}\n', '{"id": 2}\n')


def test_a_reader_who_stands_still_delays_no_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full pipe: lines are dropped, and the server's log reports this once."""
    monkeypatch.setattr(logs, "MOST_WAITING", 3)
    reading, writing = os.pipe()
    with (
        os.fdopen(reading),
        os.fdopen(writing, "w") as pipe,
        caplog.at_level(logging.ERROR, "jengine.serving"),
    ):
        monkeypatch.setattr(sys, "stdout", pipe)
        log = RequestLog("-")
        for number in range(100):
            log.write({"id": number, "filler": "x" * 100_000})
        log.close(seconds=0.05)
        assert [record.getMessage() for record in caplog.records] == [
            "the request log cannot be written fast enough; lines are dropped"
        ]
        os.set_blocking(reading, False)
        # it ends once its lines are read
        while any(thread.name == "request-log" for thread in threading.enumerate()):
            try:
                os.read(reading, 1 << 20)
            except BlockingIOError:
                log.close(seconds=0.05)


def test_what_cannot_be_written_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with caplog.at_level(logging.ERROR, "jengine.serving"):
        log = RequestLog("/dev/full")
        for _ in range(3):
            log.write({})
        log.close()
    [record] = caplog.records
    assert (
        "the request log cannot be written: " in record.getMessage()
        and "No space left" in record.getMessage()
    )


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"request_log=.*cannot be written: No such file or directory"):
        RequestLog(tmp_path / "missing" / "log")
