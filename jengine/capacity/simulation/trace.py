"""A trace: arrival times and lengths of requests. Stored in columns, so that a million requests stay small.

Files of traces are jengine's recordings, Azure's and BurstGPT's CSV, and Mooncake's JSONL. The first line
determines the format.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from jengine.base.errors import InvalidArgument

OWN_TOKENS = 1 << 30  # from here on, each request has a token of its own
OUTPUT_TOKEN = OWN_TOKENS - 1  # represents every generated token; no prompt contains it
END_TOKEN = -(2**31)  # ends a request before its limit
MOONCAKE_BLOCK = 512  # tokens of a hash id
# columns of arrivals, prompt tokens and output tokens
AZURE = "TIMESTAMP", "ContextTokens", "GeneratedTokens"
BURST_GPT = "Timestamp", "Request tokens", "Response tokens"
OURS, VERSION = "jengine_trace", 1
FIELDS = {
    "arrival", "prompt_tokens", "output_tokens", "prompt_token_ids", "prefix", "priority", "client",
    "ttft_ms", "tpot_ms", "lora",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """Requests in order of arrival. Optional columns are None if the file has none.

    Attributes:
        arrivals: float64, seconds from the first.
        prompts, outputs: int64, numbers of tokens, at least 1.
        limits: int64, the requests' max_tokens, at least their outputs: they end with an end-of-sequence
            token. None: max_tokens are the outputs.
        prefixes: by request, ids of the first blocks of its prompt; prompts with equal leading ids have equal
            leading tokens.
        block: tokens in such a block.
        priorities: int64; lower runs first, under policy="priority".
        clients: by request, its client.
        loras: by request, the adapter that it uses; None: none.
        ttft_ms, tpot_ms: float64, the request's own targets; nan if it has none.
    """

    arrivals: np.ndarray
    prompts: np.ndarray
    outputs: np.ndarray
    limits: np.ndarray | None = None
    prefixes: Sequence[tuple[int, ...]] | None = None
    block: int = 1
    priorities: np.ndarray | None = None
    clients: Sequence[str | None] | None = None
    loras: Sequence[str | None] | None = None
    ttft_ms: np.ndarray | None = None
    tpot_ms: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrivals[-1] - self.arrivals[0]) if len(self) else 0.0

    def scaled(self, rate: float) -> RequestTrace:
        """These requests, arriving `rate` times as fast.

        Raises:
            InvalidArgument: rate is not above 0.
        """
        if not 0.0 < rate < float("inf"):
            raise InvalidArgument("rate_scale", rate, "must be a number above 0")
        return replace(self, arrivals=self.arrivals / rate)

    def take(self, rows: np.ndarray) -> RequestTrace:
        """The requests at these indices, in ascending order."""
        columns = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "block"}
        taken: dict[str, Any] = {
            name: column[rows] if isinstance(column, np.ndarray) else [column[i] for i in rows]
            for name, column in columns.items()
            if column is not None
        }
        return replace(self, **taken)

    def prompt_token_ids(self, row: int) -> list[int]:
        """Artificial tokens for a request's prompt: equal to another prompt's exactly where their prefixes
        are equal.

        Tokens of blocks are numbers from 0 on; the tokens after them are the request's own.
        """
        length, token = int(self.prompts[row]), OWN_TOKENS + row
        if self.prefixes is None:
            return [token] * length
        size = self.block
        known = [id for id in self.prefixes[row] for _ in range(size)] if size > 1 else [*self.prefixes[row]]
        return known[:length] if len(known) >= length else known + [token] * (length - len(known))


def make_trace(rows: Sequence[tuple[float, int, int]], **columns: object) -> RequestTrace:
    """A trace of (arrival, prompt tokens, output tokens) rows in any order. Other columns must have the same
    length.

    Raises:
        InvalidArgument: there are no rows.
    """
    if not rows:
        raise InvalidArgument("trace", "no requests", "must hold at least one request with an output")
    table = np.array(rows, np.float64)
    order = np.argsort(table[:, 0], kind="stable")
    trace = RequestTrace(
        arrivals=table[:, 0] - table[:, 0].min(),
        prompts=table[:, 1].astype(np.int64),
        outputs=table[:, 2].astype(np.int64),
        **columns,  # type: ignore[arg-type]
    )
    return trace.take(order)


def read_trace(path: str | Path) -> RequestTrace:
    """Reads a trace file. Rows without an output token, such as failed requests, are left out.

    Raises:
        InvalidArgument: the file cannot be read, has an unknown format, or has a bad line, which the message
            names.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            lines = chain([first], file)
            return _reader(path, first)(str(path), lines)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("trace", str(path), f"cannot be read: {error}") from None


def _reader(path: str | Path, first: str) -> Callable[[str, Iterator[str]], RequestTrace]:
    if first.lstrip().startswith("{"):
        fields = _object(str(path), 1, first)
        if OURS in fields:
            return _jengine
        if {"timestamp", "input_length", "output_length"} <= fields.keys():
            return _mooncake
    header = {name.strip() for name in first.strip().split(",")}
    if header.issuperset(AZURE):
        return partial(_table, AZURE, _day_time)
    if header.issuperset(BURST_GPT):
        return partial(_table, BURST_GPT, float)
    known = (
        "a first line of Azure's CSV, BurstGPT's CSV, Mooncake's JSONL or a recording, which begins with"
        f" {{{OURS!r}: {VERSION}}}"
    )
    raise InvalidArgument("trace", str(path), f"must have {known}, not {first.strip()[:80]!r}")


def _table(
    columns: tuple[str, str, str], seconds: Callable[[str], float], path: str, lines: Iterator[str]
) -> RequestTrace:
    """A CSV file. Failed requests of BurstGPT have no response tokens."""
    arrival, *lengths = columns
    rows = [
        (_value(path, line, seconds, row[arrival]), *_lengths(path, line, row, *lengths))
        for line, row in _csv(path, lines)
    ]
    return make_trace([row for row in rows if min(row[1:]) > 0])


def _day_time(text: str) -> float:
    """Seconds of a time of day, as in 2023-11-16 18:15:46.6805900. Times without a zone are read as UTC, so
    that no hour is missing or duplicated.
    """
    time = datetime.fromisoformat(text)
    return (time.replace(tzinfo=UTC) if time.tzinfo is None else time).timestamp()


def _mooncake(path: str, lines: Iterator[str]) -> RequestTrace:
    """Times in milliseconds. Each of `hash_ids` identifies 512 tokens and everything before them."""
    rows, prefixes = [], []
    for line, fields in _json_lines(path, lines):
        row = (
            _value(path, line, float, fields.get("timestamp")) / 1e3,
            *_lengths(path, line, fields, "input_length", "output_length"),
        )
        if min(row[1:]) > 0:
            rows.append(row)
            prefixes.append(_value(path, line, _ids, fields.get("hash_ids", ())))
    return make_trace(rows, prefixes=_numbered(prefixes), block=MOONCAKE_BLOCK)


def _jengine(path: str, lines: Iterator[str]) -> RequestTrace:
    """The format of TraceRecorder, which may also be written by hand.

    Each line has an arrival in seconds, output_tokens, and either prompt_token_ids or prompt_tokens with an
    optional `prefix`.
    """
    header = _object(path, 1, next(lines))
    if header[OURS] != VERSION:
        raise InvalidArgument(OURS, header[OURS], f"must be {VERSION} ({path})")
    rows, records = [], []
    for line, fields in _json_lines(path, lines, first=2):
        if unknown := fields.keys() - FIELDS:
            raise InvalidArgument("trace", min(unknown), f"there is no such field ({path}, line {line})")
        for name in fields.keys() & {"prompt_token_ids", "prefix"}:
            fields[name] = _value(path, line, _ids, fields[name])
        if "prompt_token_ids" in fields:
            fields["prompt_tokens"] = len(fields["prompt_token_ids"])
        row = (
            _value(path, line, float, fields.get("arrival")),
            *_lengths(path, line, fields, "prompt_tokens", "output_tokens"),
        )
        if min(row[1:]) > 0:
            rows.append(row)
            records.append(fields)

    def column(name: str, default: Any = None, dtype: type | None = None) -> Any:
        values = [fields.get(name) for fields in records]
        if all(value is None for value in values):
            return None
        values = [default if value is None else value for value in values]
        return values if dtype is None else np.array(values, dtype)

    tokens, prefixes = column("prompt_token_ids", ()), column("prefix", ())
    if tokens is not None and prefixes is not None:
        raise InvalidArgument("trace", "prefix", f"a file has either prefix or prompt_token_ids ({path})")
    known = tokens or prefixes
    return make_trace(
        rows,
        prefixes=None if known is None else _numbered(known),
        block=1 if tokens is not None else _value(path, 1, int, header.get("block", 1)),
        priorities=column("priority", 0, np.int64),
        clients=column("client"),
        loras=column("lora"),
        ttft_ms=column("ttft_ms", np.nan, np.float64),
        tpot_ms=column("tpot_ms", np.nan, np.float64),
    )


def _ids(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError("it is not a list")
    hash(ids := tuple(value))
    return ids


def _numbered(prefixes: list[Any]) -> list[tuple[int, ...]]:
    """Replaces ids of any type by numbers from 0 on."""
    numbers: dict[Any, int] = {}
    return [tuple([numbers.setdefault(id, len(numbers)) for id in prefix]) for prefix in prefixes]


def _csv(path: str, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, str]]]:
    rows = csv.reader(lines)
    names = [name.strip() for name in next(rows)]
    for number, row in enumerate(rows, 2):
        if row:
            if len(row) != len(names):
                raise InvalidArgument(
                    "trace", ",".join(row), f"must have {len(names)} columns ({path}, line {number})"
                )
            yield number, dict(zip(names, row, strict=True))


def _json_lines(path: str, lines: Iterator[str], first: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, first):
        if line.strip():
            yield number, _object(path, number, line)


def _object(path: str, number: int, line: str) -> dict[str, Any]:
    fields = _value(path, number, json.loads, line)
    if not isinstance(fields, dict):
        raise InvalidArgument("trace", line, f"must be a JSON object ({path}, line {number})")
    return fields


def _lengths(path: str, number: int, row: dict[str, Any], prompt: str, output: str) -> tuple[int, int]:
    for name in (prompt, output):
        if name not in row:
            raise InvalidArgument("trace", name, f"is missing ({path}, line {number})")
    return _value(path, number, int, row[prompt]), _value(path, number, int, row[output])


def _value(path: str, number: int, make: Callable[[Any], Any], text: Any) -> Any:
    try:
        return make(text)
    except (TypeError, ValueError) as error:
        raise InvalidArgument("trace", text, f"cannot be read: {error} ({path}, line {number})") from None
