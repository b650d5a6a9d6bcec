"""Where answers go: standard output, or a file that is also the record of what has been done."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol

from jengine import InvalidArgument, JengineError
from jengine.commands.batch_records import OWN, Form, Key, Record
from jengine.commands.terminal import write

STDOUT = Path("-")
SYNC_SECONDS = 1.0  # what a power failure may cost; what is written survives the end of the process at once


class Output(Protocol):
    """Where answers go.

    Attributes:
        done: lines that have a record already.
        failed: how many of these records are errors.
    """

    done: set[Key]
    failed: int

    def write(self, records: list[Record]) -> None: ...

    def forget_errors(self) -> None:
        """Lines that failed count as never answered."""

    def finish(self) -> None:
        """Every line has a record."""

    def __enter__(self) -> Output: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def output_of(path: Path, form: Form) -> Output:
    """For records that are lines of JSON."""
    return Stdout() if path == STDOUT else Answers(path, form)


class Stdout:
    """Answers to standard output: nothing has been answered before."""

    def __init__(self) -> None:
        self.done: set[Key] = set()
        self.failed = 0

    def write(self, records: list[Record]) -> None:
        write("".join(json.dumps(record) + "\n" for record in records))

    def forget_errors(self) -> None: ...

    def finish(self) -> None: ...

    def __enter__(self) -> Stdout:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Answers:
    """The output file: answers are appended, and those that it holds already are known by their keys.

    A last line that was cut off when a process was killed is removed. One process at a time may have the file.

    Args:
        form: of its records.

    Raises:
        InvalidArgument: the file cannot be written, is in use, or holds something else.
        JengineError: later, when the disk is full.
    """

    def __init__(self, path: Path, form: Form = OWN) -> None:
        self.done: set[Key] = set()
        self.failed = 0
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
        """Append; a second later, at most, the device has it."""
        with self._writing():
            self._file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
            self._file.flush()
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self._sync()
            self._synced = time.monotonic()

    def forget_errors(self) -> None:
        """Records of lines that failed are removed, so that these lines are answered again."""
        if self.failed:
            self._drop_errors()

    def finish(self) -> None: ...

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._sync()
        with contextlib.suppress(OSError):  # what could not be written has been reported
            self._file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as wrong:
            raise JengineError(f"{self._path}: cannot be written: {wrong.strerror}; run again to go on") from None

    def _sync(self) -> None:
        with contextlib.suppress(OSError):  # a pipe or a device
            os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidArgument("output", str(self._path), "another process is writing it") from None

    def _drop_errors(self) -> None:
        """Put a file without the records of failed lines in this one's place; a crash leaves one or the other."""
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
            torn = not text.endswith(b"\n") and (text.startswith(start) or start.startswith(text) or not text.strip(b"\0"))
            if not torn:
                raise InvalidArgument("output", str(self._path), f"line {number} is no answer of this command; give another file")
            print(f"jengine: {self._path}: the last line was cut off and is done again", file=sys.stderr)
        self._file.truncate(end)
