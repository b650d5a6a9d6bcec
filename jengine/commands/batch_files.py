"""Outputs for answers: standard output, or a file that also records which lines are done."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from jengine import InvalidArgument, JengineError
from jengine.commands.terminal import write

Key = tuple[str, str | int]  # ("id", a request's own id) or ("line", its number)
Record = dict[str, Any]
STDOUT = Path("-")
SYNC_SECONDS = 1.0  # maximum loss after a power failure; a killed process loses nothing


class RecordFormat(NamedTuple):
    """How records of the output are parsed.

    Attributes:
        start: the beginning of each record, in JSON.
        key: returns the record's key. Raises KeyError, TypeError or ValueError if it is not such a record.
        error: returns the reason why the line failed; None if it was answered.
        tokens: returns the number of generated tokens.
    """

    start: bytes
    key: Callable[[Record], Key]
    error: Callable[[Record], str | None]
    tokens: Callable[[Record], int]


def _key(record: Record) -> Key:
    return ("id", record["id"]) if "id" in record else ("line", record["line"])


OWN = RecordFormat(
    start=b'{"line": ',
    key=_key,
    error=lambda record: record.get("error"),
    tokens=lambda record: sum(len(output["token_ids"]) for output in record["outputs"]),
)


class Output:
    """Writes answers to standard output. No line counts as already answered.

    Attributes:
        done: keys of lines that already have a record.
        failed: number of these records that are errors.
    """

    def __init__(self) -> None:
        self.done: set[Key] = set()
        self.failed = 0

    def write(self, records: list[Record]) -> None:
        write("".join(json.dumps(record) + "\n" for record in records))

    def forget_errors(self) -> None:
        """Treats failed lines as unanswered."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the output."""


def output_of(path: Path, form: RecordFormat) -> Output:
    """The output for records that are lines of JSON."""
    return Output() if path == STDOUT else OutputFile(path, form)


class OutputFile(Output):
    """The output file. Answers are appended; existing answers are identified by their keys.

    If a killed process left an incomplete last line, it is removed. Only one process at a time may use the
    file.

    Args:
        form: the form of its records.

    Raises:
        InvalidArgument: the file cannot be written, is in use, or contains something else.
        JengineError: later, if the disk is full.
    """

    def __init__(self, path: Path, form: RecordFormat = OWN) -> None:
        super().__init__()
        self._path, self._form = path, form
        self._synced = time.monotonic()
        try:
            self._file = path.open("a+b")
        except OSError as wrong:
            raise InvalidArgument("output", str(path), f"cannot be written: {wrong.strerror}") from None
        try:
            self._lock()
            self._recover()
        except BaseException:
            self._file.close()
            raise

    def write(self, records: list[Record]) -> None:
        """Appends records. They are on the device at most a second later."""
        with self._writing():
            self._file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
            self._file.flush()
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self._sync()
            self._synced = time.monotonic()

    def forget_errors(self) -> None:
        """Removes records of failed lines, so that these lines are answered again."""
        if self.failed:
            self._drop_errors()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sync()
        with contextlib.suppress(OSError):  # write errors have already been reported
            self._file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as wrong:
            raise JengineError(
                f"{self._path}: cannot be written: {wrong.strerror}; run the command again to continue"
            ) from None

    def _sync(self) -> None:
        with contextlib.suppress(OSError):  # not supported by pipes and devices
            os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidArgument("output", str(self._path), "another process is writing it") from None

    def _drop_errors(self) -> None:
        """Replaces the file atomically by one without the records of failed lines."""
        whole = self._file
        self._file = Path(f"{self._path}.retry").open("w+b")  # noqa: SIM115 (__exit__ closes it)
        with whole, self._writing():
            self._lock()
            self.done.clear()
            self.failed = 0
            whole.seek(0)
            for text in whole:
                record = json.loads(text)
                if self._form.error(record) is None:
                    self._file.write(text)
                    self.done.add(self._form.key(record))
            self._file.flush()
            os.fsync(self._file.fileno())
            shutil.copymode(self._path, self._file.name)
            os.replace(self._file.name, self._path)

    def _recover(self) -> None:
        self._file.seek(0)
        start, end = self._form.start, 0
        for number, text in enumerate(self._file, start=1):
            try:
                record = json.loads(text)
                key, error = self._form.key(record), self._form.error(record)
                whole = text.startswith(start) and text.endswith(b"\n") and isinstance(key[1], str | int)
            except (ValueError, TypeError, KeyError):
                whole = False
            if whole:
                self.done.add(key)
                self.failed += error is not None
                end += len(text)
                continue
            torn = not text.endswith(b"\n") and (
                text.startswith(start) or start.startswith(text) or not text.strip(b"\0")
            )
            if not torn:
                raise InvalidArgument(
                    "output",
                    str(self._path),
                    f"line {number} is not an answer of this command; choose another file",
                )
            print(
                f"jengine: {self._path}: the last line was incomplete and is answered again", file=sys.stderr
            )
        self._file.truncate(end)
