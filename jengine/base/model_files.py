"""Reads files that come with a model or an adapter, of which nothing is trusted: a file may be missing, huge,
a pipe that never ends, or JSON that breaks its readers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from jengine.base.errors import InvalidArgument, ModelError

MAX_BYTES = 100_000_000  # of a file that is read whole; the largest tokenizers and indexes have 35 MB
MAX_DEPTH = 64  # of JSON
MAX_DIGITS = 100  # of a whole number
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def open_regular(file: Path) -> BinaryIO:
    """Opens a file for reading. Does not wait for anyone, as a named pipe or a device would.

    Raises:
        ModelError: it is missing, unreadable, or anything but a regular file.
    """
    try:
        regular = stat.S_ISREG(os.stat(file).st_mode)
        # the file may have been replaced since
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if regular else -1
    except FileNotFoundError:
        raise ModelError("is missing", file=file) from None
    except (OSError, ValueError) as wrong:
        raise ModelError(f"cannot be read: {getattr(wrong, 'strerror', None) or wrong}", file=file) from None
    if descriptor >= 0 and stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    if descriptor >= 0:
        os.close(descriptor)
    raise ModelError("is not a regular file", file=file)


def check_regular(folder: Path) -> None:
    """Checks a folder whose files another library reads.

    Raises:
        ModelError: something in it is neither a regular file nor a folder.
    """
    for file in folder.rglob("*"):
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ModelError("is not a regular file", file=file)


def read_bytes(file: Path) -> bytes:
    """The content of a file of at most MAX_BYTES.

    Raises:
        ModelError: as `open_regular`; or it is larger.
    """
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > MAX_BYTES:
            raise ModelError(f"has {size} bytes; at most {MAX_BYTES} are read", file=file)
        try:
            return opened.read(size)
        except OSError as wrong:
            raise ModelError(f"cannot be read: {wrong.strerror}", file=file) from None


def read_text(file: Path) -> str:
    """The text of a file of at most MAX_BYTES.

    Raises:
        ModelError: as `read_bytes`; or it is not UTF-8.
    """
    return _decoded(read_bytes(file), file)


def read_json(file: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ModelError: as `read_bytes` or `parse_json`.
    """
    return parse_json(read_bytes(file), file)


def read_object(file: Path) -> dict[str, Any]:
    """The content of a JSON file that must be an object.

    Raises:
        ModelError: as `read_json`; or it is not an object.
    """
    return as_object(read_json(file), file)


def parse_json(data: bytes, file: object) -> Any:
    """A JSON value, nested at most MAX_DEPTH deep, with finite numbers and text that UTF-8 can encode.

    Args:
        file: in errors.

    Raises:
        ModelError: it is no such value.
    """
    text = _decoded(data, file)
    try:
        value = json.loads(text, parse_float=_finite, parse_int=_whole, parse_constant=_refuse)
    except RecursionError:
        raise ModelError(f"is nested more than {MAX_DEPTH} deep", file=file) from None
    except ValueError as wrong:
        raise ModelError(f"is not valid JSON: {wrong}", file=file) from None
    if _is_deeper(value, MAX_DEPTH):
        raise ModelError(f"is nested more than {MAX_DEPTH} deep", file=file)
    if _ESCAPED_SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ModelError("has a lone surrogate, which is not a character", file=file) from None
    return value


def as_object(value: Any, file: object) -> dict[str, Any]:
    """A JSON value that must be an object.

    Raises:
        ModelError: it is not.
    """
    if not isinstance(value, dict):
        raise ModelError("is not a JSON object", file=file)
    return value


@contextlib.contextmanager
def malformed(file: object) -> Iterator[None]:
    """Turns a reader's errors into a ModelError that names the file: missing or wrong fields."""
    try:
        yield
    except ModelError as refused:
        if refused.file is not None:
            raise
        raise ModelError(refused.reason, file=file, tensor=refused.tensor) from None
    except InvalidArgument:  # an option's, which is also a ValueError
        raise
    except KeyError as missing:
        raise ModelError(f"field {missing} is missing", file=file) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as wrong:
        raise ModelError(f"a field has the wrong type or value: {wrong}", file=file) from None


def _decoded(data: bytes, file: object) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as wrong:
        raise ModelError(f"is not text in UTF-8: {wrong}", file=file) from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits; at most {MAX_DIGITS} are read")
    return int(text)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested more than this deep."""
    level = [value]
    for _ in range(depth + 1):
        level = [
            item
            for part in level
            if isinstance(part, dict | list)
            for item in (part.values() if isinstance(part, dict) else part)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True
