"""A file of requests and the file of their answers, which is also the record of what has been done."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

from jengine import InvalidArgument, JengineError, SamplingParams
from jengine.chat import ChatOptions
from jengine.commands.terminal import write

STDIN = STDOUT = Path("-")
PROMPTS = ("prompt", "prompt_token_ids", "messages")
IDS = ("id", "custom_id")
SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))
CHAT = tuple(ChatOptions.__annotations__)
SYNC_SECONDS = 1.0  # what a power failure may cost; what is written survives the end of the process at once
START = b'{"line": '  # of every answer

Key = tuple[str, str | int]  # ("id", a line's own id) or ("line", its number)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input: a request, or what is wrong with it.

    Attributes:
        number: from 1.
        name: the line's own id.
        kind: of PROMPTS; `prompt` is its value.
        chat: options for messages.
    """

    number: int
    name: str | int | None = None
    kind: str = ""
    prompt: Any = None
    params: SamplingParams | None = None
    chat: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None

    @property
    def key(self) -> Key:
        return ("line", self.number) if self.name is None else ("id", self.name)

    def record(self, **content: Any) -> dict[str, Any]:
        """What the output says of this line."""
        named = {} if self.name is None else {"id": self.name}
        return {"line": self.number, **named, **content}


def _key(record: dict[str, Any]) -> Key:
    return ("id", record["id"]) if "id" in record else ("line", record["line"])


def count_lines(path: Path) -> int | None:
    """Lines that are not blank; None for stdin and pipes, which can be read only once.

    Raises:
        InvalidArgument: the file cannot be read.
    """
    if path == STDIN or path.is_fifo():
        return None
    with _opened(path) as file:
        return sum(not line.isspace() for line in file)


def read_lines(path: Path, defaults: dict[str, Any]) -> Iterator[Line]:
    """Every line that is not blank, in order, read when it is asked for; of those before only the ids stay in memory.

    Args:
        path: STDIN reads standard input.
        defaults: sampling parameters for lines that have none.

    Raises:
        InvalidArgument: the file cannot be read.
    """
    names: set[str | int] = set()
    with _opened(path) as file:
        for number, text in enumerate(file, start=1):
            if text.isspace():
                continue
            line = _line(number, text, defaults)
            if line.name is not None and line.name in names:
                line = Line(number, error=f"id={line.name!r}: an earlier line has this id")
            elif line.name is not None:
                names.add(line.name)
            yield line


def _opened(path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    try:
        return contextlib.nullcontext(sys.stdin.buffer) if path == STDIN else path.open("rb")
    except OSError as wrong:
        raise InvalidArgument("input", str(path), f"cannot be read: {wrong.strerror}") from None


def _line(number: int, text: bytes, defaults: dict[str, Any]) -> Line:
    name = None
    try:
        fields = json.loads(text.decode("utf-8-sig").strip())
        if not isinstance(fields, dict):
            raise JengineError(f"must be a JSON object: {_excerpt(text)}")
        name = _name(fields)
        kinds = [kind for kind in PROMPTS if kind in fields]
        if len(kinds) != 1:
            raise JengineError(f"must have one of {', '.join(PROMPTS)}; it has {len(kinds)}: {_excerpt(text)}")
        chat = {field: fields[field] for field in CHAT if field in fields} if kinds == ["messages"] else {}
        for field in fields:
            if field not in (*IDS, *SAMPLING, *kinds, *chat):
                raise InvalidArgument(field, fields[field], "there is no such field, or not for this kind of prompt")
        prompt, kind = fields[kinds[0]], kinds[0]
        if (kind == "prompt") != isinstance(prompt, str):
            raise InvalidArgument(kind, prompt, "must be text" if kind == "prompt" else "must be a list")
        params = SamplingParams(**{**defaults, **{field: fields[field] for field in SAMPLING if field in fields}})
        return Line(number, name, kind, prompt, params, chat)
    except (ValueError, RecursionError, JengineError) as wrong:  # those of JSON and UTF-8 are ValueErrors
        return Line(number, name, error=str(wrong))


def _excerpt(text: bytes) -> str:
    """A line as it was written, cut after 80 characters."""
    line = text.decode("utf-8-sig").strip()
    return line if len(line) <= 80 else line[:77] + "..."


def _name(fields: dict[str, Any]) -> str | int | None:
    given = [fields[field] for field in IDS if fields.get(field) is not None]
    if not given:
        return None
    if len(given) > 1 or type(given[0]) not in (str, int):
        raise InvalidArgument("id", given, "must be one text or whole number, as id or custom_id")
    name: str | int = given[0]
    return name


class Output(Protocol):
    """Where answers go.

    Attributes:
        done: lines that have a record already.
        failed: how many of these records are errors.
    """

    done: set[Key]
    failed: int

    def write(self, records: list[dict[str, Any]]) -> None: ...

    def __enter__(self) -> Output: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Stdout:
    """Answers to standard output: nothing has been answered before."""

    def __init__(self) -> None:
        self.done: set[Key] = set()
        self.failed = 0

    def write(self, records: list[dict[str, Any]]) -> None:
        write("".join(json.dumps(record) + "\n" for record in records))

    def __enter__(self) -> Stdout:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Answers:
    """The output file: answers are appended, and those that it holds already are known by their keys.

    A last line that was cut off when a process was killed is removed. One process at a time may have the file.

    Args:
        retry_errors: records of lines that failed are removed, so that these lines are answered again.

    Raises:
        InvalidArgument: the file cannot be written, is in use, or holds something else.
        JengineError: later, when the disk is full.
    """

    def __init__(self, path: Path, *, retry_errors: bool = False) -> None:
        self.done: set[Key] = set()
        self.failed = 0
        self._path = path
        self._synced = time.monotonic()
        try:
            self._file = path.open("a+b")
        except OSError as wrong:
            raise InvalidArgument("output", str(path), f"cannot be written: {wrong.strerror}") from None
        try:
            self._lock()
            self._recover()
            if retry_errors and self.failed:
                self._drop_errors()
        except BaseException:
            self._file.close()
            raise

    def write(self, records: list[dict[str, Any]]) -> None:
        """Append; a second later, at most, the device has it."""
        with self._writing():
            self._file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
            self._file.flush()
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self._sync()
            self._synced = time.monotonic()

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
                if "error" not in record:
                    self._file.write(text)
                    self.done.add(_key(record))
            self._file.flush()
            os.fsync(self._file.fileno())
            shutil.copymode(self._path, self._file.name)
            os.replace(self._file.name, self._path)

    def _recover(self) -> None:
        self._file.seek(0)
        end = 0
        for number, text in enumerate(self._file, start=1):
            try:
                record = json.loads(text)
                key = _key(record)
                whole = text.startswith(START) and text.endswith(b"\n") and isinstance(key[1], str | int)
            except (ValueError, TypeError, KeyError):
                whole = False
            if whole:
                self.done.add(key)
                self.failed += "error" in record
                end += len(text)
                continue
            torn = not text.endswith(b"\n") and (text.startswith(START) or START.startswith(text) or not text.strip(b"\0"))
            if not torn:
                raise InvalidArgument("output", str(self._path), f"line {number} is no answer of this command; give another file")
            print(f"jengine: {self._path}: the last line was cut off and is done again", file=sys.stderr)
        self._file.truncate(end)
