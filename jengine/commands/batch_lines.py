"""Requests of `jengine generate --input` and the command's own format, one JSON object per line; and outputs
for answers: standard output, or a file that also records which lines are done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self

from jengine import EngineDead, InvalidArgument, JengineError, RequestOutput, SamplingParams
from jengine.api.chat import ChatOptions
from jengine.commands.terminal import write

if TYPE_CHECKING:
    from jengine import AsyncLLM


Key = tuple[str, str | int]  # ("id", a request's own id) or ("line", its number)
Record = dict[str, Any]
STDOUT = Path("-")
SYNC_SECONDS = 1.0  # maximum loss after a power failure; a killed process loses nothing


class Format(NamedTuple):
    """A form of requests, and of the records of their answers.

    Attributes:
        start: the beginning of each record, in JSON.
        id: the field with a request's id, which must be unique.
        key: returns the record's key. Raises KeyError, TypeError or ValueError if it is not such a record.
        error: returns the reason why the line failed; None if it was answered.
        tokens: returns the number of generated tokens.
        read: parses the line with this number.
        answering: a context with the function that answers requests.
    """

    start: bytes
    id: str
    key: Callable[[Record], Key]
    error: Callable[[Record], str | None]
    tokens: Callable[[Record], int]
    read: Callable[[int, bytes], Line]
    answering: Callable[[AsyncLLM], contextlib.AbstractContextManager[Answer]]


def own_format(defaults: dict[str, Any]) -> Format:
    """The command's own format. defaults: sampling parameters for lines that do not set them."""
    return Format(
        start=b'{"line": ',
        id="id",
        key=_key,
        error=lambda record: record.get("error"),
        tokens=lambda record: sum(len(output["token_ids"]) for output in record["outputs"]),
        read=partial(read_line, defaults),
        answering=lambda llm: contextlib.nullcontext(partial(answer_line, llm)),
    )


def _key(record: Record) -> Key:
    return ("id", record["id"]) if "id" in record else ("line", record["line"])


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

    def __exit__(self, *_: object) -> None:
        """Ends the output."""


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

    def __init__(self, path: Path, form: Format) -> None:
        super().__init__()
        self._path, self._form = path, form
        self._synced = time.monotonic()
        try:
            self._file = path.open("a+b")
        except OSError as wrong:
            raise InvalidArgument(
                "output", str(path), f"cannot be written: {wrong.strerror or wrong}"
            ) from None
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

    def __exit__(self, *_: object) -> None:
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

    def forget_errors(self) -> None:
        """Removes records of failed lines, so that these lines are answered again. Replaces the file
        atomically.
        """
        if not self.failed:
            return
        whole, retry = self._file, Path(f"{self._path}.retry")
        try:
            self._file = retry.open("w+b")
        except OSError as wrong:
            limit = f"{retry.name} cannot be written beside it: {wrong.strerror}"
            raise InvalidArgument("output", str(self._path), limit) from None
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
        if self._file.seek(0, os.SEEK_END) > end:  # a device has no length to cut
            self._file.truncate(end)


STDIN = Path("-")
PROMPTS = ("prompt", "prompt_token_ids", "messages")
IDS = ("id", "custom_id")
SAMPLING = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name != "output_kind")
CHAT = tuple(ChatOptions.__annotations__)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input: a request, or an error.

    Attributes:
        number: from 1.
        name: the line's own id.
        kind: one of PROMPTS, with `prompt` as its value; or a path of OpenAI's API, with `prompt` as the
            body.
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

    def record(self, **content: Any) -> Record:
        """The output's record for this line."""
        named = {} if self.name is None else {"id": self.name}
        return {"line": self.number, **named, **content}


Answer = Callable[[Line], Awaitable[Record]]


def unique(lines: Iterable[Line], field: str) -> Iterator[Line]:
    """Replaces a line with a duplicate id by an error. Only ids of earlier lines stay in memory."""
    names: set[str | int] = set()
    for line in lines:
        if line.name is not None and line.name in names:
            line = Line(line.number, error=f"{field}={line.name!r}: an earlier line has this {field}")
        elif line.name is not None:
            names.add(line.name)
        yield line


async def answer_line(llm: AsyncLLM, line: Line) -> Record:
    """Answers a line. Returns its record."""
    if line.error is not None:
        return line.record(error=line.error)
    try:
        if line.kind == "messages":
            outputs = llm.chat(line.prompt, line.params, output_kind="final", **line.chat)
        else:
            outputs = llm.generate(line.prompt, line.params, output_kind="final")
        [output] = [output async for output in outputs]
        output.require_answer()
    except EngineDead:
        raise
    except JengineError as failure:
        return line.record(error=str(failure))
    return line.record(**_shown(output))


def _shown(output: RequestOutput) -> Record:
    """The content of a record for an answer, with log probabilities if requested."""
    fields = dataclasses.asdict(output)
    for part in (fields, *fields["outputs"]):
        for name in ("prompt_logprobs", "logprobs", "cumulative_logprob"):
            if name in part and part[name] is None:
                del part[name]
    shown = {name: fields[name] for name in fields if name in ("outputs", "prompt_logprobs")}
    return {"prompt_tokens": len(output.prompt_token_ids), **shown}


# --- reading --------------------------------------------------------------------------------------


def read_again(path: Path) -> bool:
    """Whether a file can be read more than once."""
    return path != STDIN and not path.is_fifo()


def number_of_lines(path: Path) -> int | None:
    """Number of non-blank lines; None for stdin and pipes, which can be read only once.

    Raises:
        InvalidArgument: the file cannot be read.
    """
    return sum(1 for _ in numbered(path)) if read_again(path) else None


def numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every non-blank line with its number, from 1. STDIN reads standard input.

    Raises:
        InvalidArgument: the file cannot be read.
    """
    file: contextlib.AbstractContextManager[BinaryIO]
    try:
        file = contextlib.nullcontext(sys.stdin.buffer) if path == STDIN else path.open("rb")
    except OSError as wrong:
        raise InvalidArgument("input", str(path), f"cannot be read: {wrong.strerror}") from None
    with file as lines:
        for number, text in enumerate(lines, start=1):
            if not text.isspace():
                yield number, text


def read_line(defaults: dict[str, Any], number: int, text: bytes) -> Line:
    """Parses a line in the command's own format: one of PROMPTS, sampling parameters and, for messages,
    ChatOptions.
    """
    name = None
    try:
        fields = json_object(text)
        name = _name(fields)
        fields = {field: value for field, value in fields.items() if field not in IDS}
        kinds = [kind for kind in PROMPTS if kind in fields]
        if len(kinds) != 1:
            raise JengineError(f"must have one of {', '.join(PROMPTS)}; it has {len(kinds)}: {excerpt(text)}")
        chat = {field: fields[field] for field in CHAT if field in fields} if kinds == ["messages"] else {}
        for field in fields:
            if field not in (*SAMPLING, *kinds, *chat):
                raise InvalidArgument(field, fields[field], "there is no such field for this kind of prompt")
        prompt, kind = fields[kinds[0]], kinds[0]
        if (kind == "prompt") != isinstance(prompt, str):
            raise InvalidArgument(kind, prompt, "must be text" if kind == "prompt" else "must be a list")
        sampling = {field: fields[field] for field in SAMPLING if field in fields}
        return Line(number, name, kind, prompt, SamplingParams(**{**defaults, **sampling}), chat)
    except (ValueError, RecursionError, JengineError) as wrong:  # invalid JSON and UTF-8 raise ValueErrors
        return Line(number, name, error=str(wrong))


def json_object(text: bytes) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        JengineError: it is not valid.
    """
    try:
        fields = json.loads(text.decode("utf-8-sig").strip())
    except (ValueError, RecursionError) as wrong:  # of invalid JSON and UTF-8
        raise JengineError(f"is not JSON: {_reason(wrong)}") from None
    if not isinstance(fields, dict):
        raise JengineError(f"must be a JSON object: {excerpt(text)}")
    return fields


def _reason(wrong: Exception) -> str:
    """Without the line's number within the line, which is always 1."""
    if isinstance(wrong, json.JSONDecodeError):
        return f"{wrong.msg} at character {wrong.pos + 1}: {excerpt(wrong.doc.encode())}"
    return "it is nested too deeply" if isinstance(wrong, RecursionError) else str(wrong)


def excerpt(text: bytes) -> str:
    """A line's text, cut after 80 characters."""
    line = text.decode("utf-8-sig").strip()
    return line if len(line) <= 80 else line[:77] + "..."


def _name(fields: dict[str, Any]) -> str | int | None:
    ids = [fields[field] for field in IDS if fields.get(field) is not None]
    if not ids:
        return None
    if len(ids) > 1 or type(ids[0]) not in (str, int):
        raise InvalidArgument("id", ids, "must be one text or whole number, given as id or custom_id")
    name: str | int = ids[0]
    return name
