"""Records in the output of `jengine generate --input`, and how to parse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Key = tuple[str, str | int]  # ("id", a request's own id) or ("line", its number)
Record = dict[str, Any]


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
