"""Reads and writes Parquet and CSV files in parts that fit into memory."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 1024  # rows in memory at a time
BLOCK = 2**24  # bytes of a CSV file read at a time; a row must fit


@contextlib.contextmanager
def reading(path: Path, field: str = "input") -> Iterator[None]:
    """Raises InvalidArgument if the table cannot be read."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as wrong:
        raise InvalidArgument(field, str(path), f"cannot be read: {wrong}") from None
    except OSError as wrong:
        raise InvalidArgument(field, str(path), f"cannot be read: {wrong.strerror or wrong}") from None


def schema_of(path: Path, kind: str) -> pa.Schema:
    """The table's columns. Those of CSV are text."""
    import pyarrow as pa
    from pyarrow import parquet

    if kind == "parquet":
        return parquet.read_schema(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        names = next(csv.reader(file), [])
    return pa.schema([(name, pa.string()) for name in names])


def batches_of(
    path: Path, kind: str, schema: pa.Schema, columns: list[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Batches of at most ROWS rows."""
    from pyarrow import csv as tables
    from pyarrow import parquet

    if kind == "parquet":
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(ROWS, columns=columns)
        return
    reader = tables.open_csv(
        path,
        read_options=tables.ReadOptions(block_size=BLOCK),
        parse_options=tables.ParseOptions(newlines_in_values=True),
        convert_options=tables.ConvertOptions(column_types=schema),
    )
    with reader:
        for batch in reader:
            yield from (batch.slice(start, ROWS) for start in range(0, batch.num_rows, ROWS))


def rows_of(path: Path, kind: str, schema: pa.Schema) -> int:
    from pyarrow import parquet

    if kind == "parquet":
        return int(parquet.read_metadata(path).num_rows)
    return sum(batch.num_rows for batch in batches_of(path, kind, schema))


def writer_of(path: Path, kind: str, schema: pa.Schema) -> contextlib.AbstractContextManager[Any]:
    """A writer with a method write_batch."""
    from pyarrow import csv as tables
    from pyarrow import parquet

    writer: contextlib.AbstractContextManager[Any] = (
        parquet.ParquetWriter(path, schema) if kind == "parquet" else tables.CSVWriter(str(path), schema)
    )
    return writer
