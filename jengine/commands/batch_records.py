"""Records of the output of `jengine generate --input`, and how those of a file are read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Key = tuple[str, str | int]  # ("id", a request's own id) or ("line", its number)
Record = dict[str, Any]


class Form(NamedTuple):
    """How records of the output are read.

    Attributes:
        start: how each of them begins, in JSON.
        key: raises KeyError, TypeError or ValueError where it is no such record.
        error: why the line failed; None where it was answered.
        tokens: that were generated.
    """

    start: bytes
    key: Callable[[Record], Key]
    error: Callable[[Record], str | None]
    tokens: Callable[[Record], int]


def _key(record: Record) -> Key:
    return ("id", record["id"]) if "id" in record else ("line", record["line"])


OWN = Form(
    start=b'{"line": ',
    key=_key,
    error=lambda record: record.get("error"),
    tokens=lambda record: sum(len(output["token_ids"]) for output in record["outputs"]),
)
