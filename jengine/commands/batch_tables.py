"""Tables of requests, Parquet and CSV. The output is the table with additional columns for answers, in the
same order.
"""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine import InvalidArgument, JengineError
from jengine.commands.batch_files import STDOUT, Output, OutputFile
from jengine.commands.batch_lines import PROMPTS, Answer, Line, answer_line, read_again, request
from jengine.commands.batch_records import OWN, Record
from jengine.commands.table_files import batches_of, reading, rows_of, schema_of, writer_of

if TYPE_CHECKING:
    import pyarrow as pa

    from jengine import AsyncLLM

SAMPLING = "sampling_params"  # a column with each row's parameters
JOURNAL, JOINING = ".journal", ".joining"  # suffixes of files beside the output, until it is complete


class BatchTable:
    """A Source. A row is identified by its number.

    Args:
        kind: parquet or csv. All columns of CSV are text, with lists and objects as JSON.
        column: the column with the prompts; None: the one whose name is in PROMPTS.
        defaults: sampling parameters for rows without the column `sampling_params`.
    """

    form = OWN

    def __init__(self, path: Path, kind: str, column: str | None, defaults: dict[str, Any]) -> None:
        try:
            import pyarrow  # noqa: F401
        except ModuleNotFoundError as missing:
            raise InvalidArgument.needs_extra("input", str(path), "parquet", missing) from None
        if not read_again(path):
            raise InvalidArgument("input", str(path), "a table must be a file: it is read more than once")
        self.path, self.kind, self._defaults = path, kind, defaults
        self._rows: int | None = None
        _check_sampling(defaults)
        with reading(path):
            self.schema = schema_of(path, kind)
        names = self.schema.names
        if len({*names}) < len(names):
            raise InvalidArgument("input", str(path), "must not have two columns with the same name")
        self._column = column or self._find_column()
        if self._column not in names:
            raise InvalidArgument(
                "prompt_column", column, f"there is no such column, only {', '.join(names)[:200]}"
            )
        self._prompts = self._column if self._column in PROMPTS else self._kind_of_prompts()
        if taken := {*names} & {*answer_fields(kind)}:
            raise InvalidArgument(
                "input", str(path), f"must not have columns of the answers: {', '.join(sorted(taken))}"
            )

    def _find_column(self) -> str:
        found = [name for name in PROMPTS if name in self.schema.names]
        if len(found) != 1:
            which = (
                f"none of the columns is called {' or '.join(PROMPTS)}"
                if not found
                else f"the columns {' and '.join(found)} could be it"
            )
            limit = (
                f"must name the column of the prompts (--prompt-column): {which}; there are"
                f" {', '.join(self.schema.names)[:200]}"
            )
            raise InvalidArgument("prompt_column", None, limit)
        return found[0]

    def _kind_of_prompts(self) -> str:
        import pyarrow as pa

        kind = self.schema.field(self._column).type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return "prompt_token_ids" if pa.types.is_integer(kind.value_type) else "messages"
        return "prompt"

    def count(self) -> int:
        if self._rows is None:
            with reading(self.path):
                self._rows = rows_of(self.path, self.kind, self.schema)
        return self._rows

    def batches(self, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows, with these columns or all. For CSV always all."""
        with reading(self.path):
            yield from batches_of(self.path, self.kind, self.schema, columns)

    def lines(self) -> Iterator[Line]:
        number = 0
        columns = [name for name in (self._column, SAMPLING) if name in self.schema.names]
        for batch in self.batches(columns):
            prompts = batch.column(self._column).to_pylist()
            given = batch.column(SAMPLING).to_pylist() if SAMPLING in columns else [None] * len(prompts)
            for prompt, params in zip(prompts, given, strict=True):
                number += 1
                yield self._line(number, prompt, params)

    def _line(self, number: int, prompt: Any, params: Any) -> Line:
        try:
            if isinstance(prompt, str) and self._prompts != "prompt":
                prompt = _parsed(self._column, prompt)
            if isinstance(params, str):
                params = _parsed(SAMPLING, params or "{}")
            if not isinstance(params, dict | None):
                raise InvalidArgument(SAMPLING, params, "must be an object")
            if not prompt:  # a cell without a value
                raise InvalidArgument(self._column, prompt, "must not be empty")
            sampling = {name: value for name, value in (params or {}).items() if value is not None}
            if wrong := sampling.keys() & {*PROMPTS}:
                raise InvalidArgument(
                    f"{SAMPLING}.{min(wrong)}", sampling[min(wrong)], "is not a sampling parameter"
                )
            _check_sampling(sampling)
            return request(number, None, {self._prompts: prompt, **sampling}, self._defaults, f"row {number}")
        except JengineError as wrong:
            return Line(number, error=str(wrong))

    def output(self, path: Path) -> Output:
        if path == STDOUT:
            raise InvalidArgument("output", "-", "a table's answers need --output FILE")
        return OutputTable(path, self)

    @contextlib.contextmanager
    def answering(self, llm: AsyncLLM) -> Iterator[Answer]:
        yield lambda line: answer_line(llm, line)


def _parsed(column: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise InvalidArgument(column, text, f"must be JSON: {wrong}") from None


def _check_sampling(params: dict[str, Any]) -> None:
    for name, one in (("n", 1), ("logprobs", None), ("prompt_logprobs", None)):
        if params.get(name, one) != one:
            raise InvalidArgument(
                name, params[name], "is not supported in tables, which have one text per row; use JSONL"
            )


class OutputTable(OutputFile):
    """The output table.

    Until every row has an answer, answers are kept in a journal beside it, one per line. Then the table is
    written to a temporary file and renamed. Rows of an existing table are not answered again.
    """

    def __init__(self, path: Path, table: BatchTable) -> None:
        self._target, self._table = path, table
        if path.is_dir():
            raise InvalidArgument("output", str(path), "cannot be written: Is a directory")
        super().__init__(Path(f"{path}{JOURNAL}"))
        self._changed = bool(self.done) or not path.exists()  # whether the table must be written
        try:
            # the process that had the journal has finished meanwhile
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise InvalidArgument("output", str(path), "another process is writing it")
            if path.exists():
                self._take_over()
        except BaseException:
            if not self.done:
                self._path.unlink(missing_ok=True)
            self._file.close()
            raise

    def write(self, records: list[Record]) -> None:
        self._changed = True
        super().write(records)

    def _take_over(self) -> None:
        """Adds the finished table's rows that are not in the journal."""
        with reading(self._target, "output"):
            schema = schema_of(self._target, self._table.kind)
            if schema.names != [*self._table.schema.names, *answer_fields(self._table.kind)]:
                raise InvalidArgument(
                    "output",
                    str(self._target),
                    "is not a table of answers to this input; choose another file",
                )
            if (number := rows_of(self._target, self._table.kind, schema)) > (rows := self._table.count()):
                raise InvalidArgument(
                    "output",
                    str(self._target),
                    f"has {number} rows, but the input has {rows}; choose another file",
                )
            number = 0
            for batch in batches_of(
                self._target, self._table.kind, schema, [*answer_fields(self._table.kind)]
            ):
                answers = batch.select([*answer_fields(self._table.kind)]).to_pylist()
                records = [_record_of(number + i, answer) for i, answer in enumerate(answers, start=1)]
                number += len(records)
                new = [record for record in records if OWN.key(record) not in self.done]
                super().write(new)
                self.done.update(map(OWN.key, new))
                self.failed += sum("error" in record for record in new)

    def finish(self) -> None:
        """Writes the table. If the process is killed, the journal stays, and the next run finishes."""
        joining = Path(f"{self._target}{JOINING}")
        with self._writing():
            if self._changed:
                self._join(joining)
                with joining.open("rb") as written:
                    os.fsync(written.fileno())
                os.replace(joining, self._target)
            self._path.unlink()

    def _join(self, path: Path) -> None:
        import pyarrow as pa

        fields = answer_fields(self._table.kind)
        schema = pa.schema(
            [*self._table.schema, *(pa.field(name, kind) for name, kind in fields.items())],
            self._table.schema.metadata,
        )
        offsets = self._offsets()
        with writer_of(path, self._table.kind, schema) as writer:
            row = 0
            for batch in self._table.batches():
                answers = [_columns(self._read(offset)) for offset in offsets[row : row + batch.num_rows]]
                row += batch.num_rows
                columns = [
                    pa.array([_cell(answer[name], kind) for answer in answers], kind)
                    for name, kind in fields.items()
                ]
                writer.write_batch(pa.RecordBatch.from_arrays([*batch.columns, *columns], schema=schema))

    def _offsets(self) -> array[int]:
        """Offset of each row's record in the journal."""
        offsets = array("q", [-1]) * self._table.count()
        self._file.seek(0)
        begin = 0
        for text in self._file:
            number = json.loads(text)["line"]
            if number <= len(offsets):
                offsets[number - 1] = begin
            begin += len(text)
        return offsets

    def _read(self, offset: int) -> Record:
        self._file.seek(offset)
        record: Record = json.loads(self._file.readline())
        return record


# --- a row's answer -------------------------------------------------------------------------------


def answer_fields(kind: str) -> dict[str, pa.DataType]:
    """The columns of an answer with their types, named as in Ray Data LLM."""
    import pyarrow as pa

    tokens = pa.string() if kind == "csv" else pa.list_(pa.int32())
    return {
        "generated_text": pa.string(),
        "generated_tokens": tokens,
        "num_input_tokens": pa.int32(),
        "num_generated_tokens": pa.int32(),
        "finish_reason": pa.string(),
        "error": pa.string(),
    }


def _columns(record: Record) -> dict[str, Any]:
    if "error" in record:
        return {**dict.fromkeys(answer_fields("parquet")), "error": record["error"]}
    [output] = record["outputs"]
    return {
        "generated_text": output["text"],
        "generated_tokens": output["token_ids"],
        "num_input_tokens": record["prompt_tokens"],
        "num_generated_tokens": len(output["token_ids"]),
        "finish_reason": output["finish_reason"],
        "error": None,
    }


def _cell(value: Any, kind: pa.DataType) -> Any:
    return json.dumps(value) if isinstance(value, list) and str(kind) == "string" else value


def _record_of(number: int, answer: dict[str, Any]) -> Record:
    """The inverse of `_columns`."""
    if answer["error"]:
        return {"line": number, "error": answer["error"]}
    tokens = answer["generated_tokens"]
    output = {
        "text": answer["generated_text"],
        "token_ids": json.loads(tokens) if isinstance(tokens, str) else tokens,
        "finish_reason": answer["finish_reason"],
    }
    return {"line": number, "prompt_tokens": int(answer["num_input_tokens"]), "outputs": [output]}
