"""`jengine generate --input` with Parquet and CSV: every row once, with its columns, whenever the process is
killed.
"""

from __future__ import annotations

import csv
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from jengine import Tokenizer, cli
from jengine.commands import batch_tables, table_files
from tests.batch_mocks import make_tokenizer, start, use_mock

FLAGS = ("--max-tokens=4", "--temperature=0", "--quiet")
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write(path: Path, rows: Rows) -> None:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(
            {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
            for row in rows
        )


def read(path: Path) -> Rows:
    """The rows of a table, with lists as lists in every format."""
    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pylist()  # type: ignore[no-any-return]
    with path.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    numbers = ("generated_tokens", "num_input_tokens", "num_generated_tokens")
    return [
        {
            name: json.loads(value) if value and name in numbers else value or None
            for name, value in row.items()
        }
        for row in rows
    ]


@pytest.fixture(params=["parquet", "csv"])
def files(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    return tmp_path / f"in.{request.param}", tmp_path / f"out.{request.param}"


def command(model: Path, files: tuple[Path, Path], *more: str) -> list[str]:
    return ["generate", str(model), f"--input={files[0]}", f"--output={files[1]}", *FLAGS, *more]


def test_rows_of_every_kind(
    model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_mock(monkeypatch)
    monkeypatch.setattr(table_files, "ROWS", 2)  # rows in memory: there are several batches
    rows = [
        {"key": "a", "prompt": 'quick, "brown"\nfox', "sampling_params": ""},
        {"key": "b", "prompt": "two", "sampling_params": '{"max_tokens": 2}'},
        {"key": "c", "prompt": "", "sampling_params": ""},
        {"key": "d", "prompt": "x", "sampling_params": '{"temprature": 2}'},
        {"key": "e", "prompt": "x", "sampling_params": "hot"},
        {"key": "f", "prompt": "x", "sampling_params": '{"n": 2}'},
        {"key": "g", "prompt": "x", "sampling_params": '{"messages": []}'},
        {"key": "h", "prompt": "größer 你好", "sampling_params": "{}"},
    ]
    write(files[0], rows)
    assert cli.main(command(model, files)) == 1
    answers = read(files[1])
    tokenizer = Tokenizer.load(model)
    assert [(row["key"], row["prompt"] or "") for row in answers] == [
        (row["key"], row["prompt"]) for row in rows
    ]
    for i, most in ((0, 4), (1, 2), (7, 4)):
        ids = tokenizer.encode(str(rows[i]["prompt"]))
        expected = (ids * 4)[:most]
        assert answers[i]["generated_tokens"] == expected and answers[i][
            "generated_text"
        ] == tokenizer.decode(expected)
        assert (answers[i]["num_input_tokens"], answers[i]["num_generated_tokens"]) == (len(ids), most)
        assert (answers[i]["finish_reason"], answers[i]["error"]) == ("length", None)
    reasons = {
        2: "must not be empty",
        3: "temprature",
        4: "sampling_params='hot': must be JSON",
        5: "n=2: ",
        6: "sampling_params.messages",
    }
    for i, reason in reasons.items():
        assert (
            reason in answers[i]["error"]
            and answers[i]["generated_text"] is None
            and answers[i]["num_input_tokens"] is None
        )
    assert sorted(path.name for path in files[0].parent.iterdir()) == sorted(path.name for path in files)
    assert "jengine: line 6: n=2" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["parquet", "csv"])
@pytest.mark.parametrize(
    "name, values",
    [("prompt_token_ids", [[5, 6, 7], [9]]), ("messages", [[{"role": "user", "content": "hello"}]] * 2)],
)
def test_prompts_that_are_lists(
    form: str, name: str, values: list[Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_mock(monkeypatch)
    files = tmp_path / f"in.{form}", tmp_path / f"out.{form}"
    write(files[0], [{name: value} for value in values])
    assert cli.main(command(model, files)) == 0
    ids = (
        values
        if name == "prompt_token_ids"
        else [Tokenizer.load(model).encode("<s>user: hello\n<s>assistant:", add_special_tokens=False)] * 2
    )
    assert [row["generated_tokens"] for row in read(files[1])] == [(one * 4)[:4] for one in ids]


def test_prompts_by_another_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_mock(monkeypatch)
    files = tmp_path / "in.parquet", tmp_path / "out.parquet"
    rows = [{"question": "why", "ids": [3, 4], "chat": [{"role": "user", "content": "x"}], "prompt_id": 5}]
    write(files[0], rows)
    for column, tokens in (("question", None), ("ids", [3, 4, 3, 4]), ("chat", None)):
        assert cli.main(command(model, files, f"--prompt-column={column}")) == 0
        [row] = read(files[1])
        assert row["num_generated_tokens"] == 4 and (tokens is None or row["generated_tokens"] == tokens)
        assert {name: row[name] for name in rows[0]} == rows[0]
        files[1].unlink()


@pytest.mark.parametrize(
    "rows, more, message",
    [
        (
            [{"text": "x", "id": 1}],
            (),
            "prompt_column=None: must name the column of the prompts (--prompt-column): none of the columns",
        ),
        (
            [{"text": "x", "id": 1}],
            (),
            "is called prompt or prompt_token_ids or messages; there are text, id",
        ),
        ([{"prompt": "x", "messages": "[]"}], (), "the columns prompt and messages could be it"),
        (
            [{"prompt": "x"}],
            ("--prompt-column=text",),
            "prompt_column='text': there is no such column, only prompt",
        ),
        ([{"prompt": "x", "error": "y"}], (), "must not have columns of the answers: error"),
        ([{"prompt": "x"}], ("--n=2",), "n=2: is not supported in tables"),
        ([{"prompt": "x"}], ("--logprobs=2",), "logprobs=2: is not supported in tables"),
        (
            [{"prompt": "x"}],
            ("--served-model-name=m",),
            "served_model_name='m': needs --input of the format openai",
        ),
        ([{"prompt": "x"}], ("--output=-",), "a table's answers need --output FILE"),
        (
            [{"prompt": "x"}],
            ("--input-format=jsonl", "--prompt-column=x"),
            "needs --input of the format parquet or csv",
        ),
        ([{"prompt": "x"}], ("--input=-", "--input-format=csv"), "a table must be a file"),
    ],
)
def test_what_a_table_cannot_be(
    rows: Rows,
    more: tuple[str, ...],
    message: str,
    model: Path,
    files: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(files[0], rows)
    assert cli.main(command(model, files, *more)) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in files[0].parent.iterdir()] == [files[0].name]


def test_files_that_are_no_tables(
    model: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_bytes(b"prompt\nx\ny,z\n")  # no Parquet, and as CSV a row with too much
    assert cli.main(command(model, files)) == 2
    assert "cannot be read" in capsys.readouterr().err
    write(files[0], [{"prompt": "x"}])
    write(files[1], [{"mine": "x"}])
    mine = files[1].read_bytes()
    assert cli.main(command(model, files)) == 2
    assert (
        "is not a table of answers to this input; choose another file" in capsys.readouterr().err
        and files[1].read_bytes() == mine
    )
    assert len([*files[0].parent.iterdir()]) == 2


def test_answered_once(
    model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answered rows do not change if nothing is new, if rows were added, or if errors are retried."""
    engines = use_mock(monkeypatch)
    rows = [{"prompt": f"row {i}" if i != 3 else ""} for i in range(6)]
    write(files[0], rows)
    assert cli.main(command(model, files)) == 1
    first, content, changed = read(files[1]), files[1].read_bytes(), files[1].stat().st_mtime_ns
    capsys.readouterr()
    run = [part for part in command(model, files) if part != "--quiet"]
    assert cli.main(run) == 1
    assert (
        capsys.readouterr().err
        == "nothing to do: 6 lines answered before, 1 of them with an error: --retry-errors answers these"
        " again\n"
    )
    assert files[1].read_bytes() == content and files[1].stat().st_mtime_ns == changed and len(engines) == 1
    rows[3]["prompt"] = "now"
    write(files[0], [*rows, {"prompt": "added"}])
    assert cli.main([*run, "--retry-errors"]) == 0
    assert "2 of 7 lines answered; 8 tokens" in capsys.readouterr().err
    later = read(files[1])
    assert [row for i, row in enumerate(later[:6]) if i != 3] == [
        row for i, row in enumerate(first) if i != 3
    ]
    assert (later[3]["generated_text"], later[6]["generated_text"]) == (
        "now"[:3],
        later[6]["generated_text"],
    ) or later[3]["error"] is None
    write(files[0], rows[:2])
    assert cli.main(command(model, files)) == 2
    assert "has 7 rows, but the input has 2; choose another file" in capsys.readouterr().err
    assert sorted(path.name for path in files[0].parent.iterdir()) == sorted(path.name for path in files)


@pytest.mark.parametrize("step", ["replace", "unlink"])
def test_stopped_while_it_finishes(
    step: str, model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the journal and the table there is always one that has everything."""
    engines = use_mock(monkeypatch)
    write(files[0], [{"prompt": f"row {i}"} for i in range(5)])

    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        (
            patch.setattr(batch_tables.os, "replace", kill)
            if step == "replace"
            else patch.setattr(Path, "unlink", kill)
        )
        cli.main(command(model, files))
    assert files[1].exists() == (step == "unlink")
    assert cli.main(command(model, files)) == 0
    assert [row["prompt"] for row in read(files[1])] == [f"row {i}" for i in range(5)] and len(engines) == 1
    assert sorted(path.name for path in files[0].parent.iterdir()) == sorted(path.name for path in files)


def killed_five_times(model: str, files: tuple[Path, Path], rows: int, seed: int, begin: Any) -> None:
    """SIGKILL after a random number of new answers, then at a random moment, five times in all; then to the
    end.
    """
    chance = random.Random(seed)
    write(files[0], [{"key": i, "prompt": f"row {i} " + "x" * chance.randrange(20)} for i in range(rows)])
    journal = Path(f"{files[1]}.journal")
    arguments = [
        "generate",
        model,
        f"--input={files[0]}",
        f"--output={files[1]}",
        "--max-tokens=4",
        "--temperature=0",
        "--ignore-eos",
    ]
    answered = 0
    for _ in range(5):
        target = answered + chance.randrange(1, 60)
        with begin(arguments) as process:
            deadline = time.monotonic() + 240
            while not journal.exists() or journal.read_bytes().count(b"\n") < target:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(chance.random() * 0.01)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL and not files[1].exists()
        answered = journal.read_bytes().count(b"\n")
    assert 5 <= answered < rows
    with begin(arguments) as process:
        told = process.stderr.read()
        assert process.wait() == 0, told
    # no finished row was done again
    assert f"{rows - answered} of {rows} lines answered; {4 * (rows - answered)} tokens" in told
    answers = read(files[1])
    assert [row["key"] for row in answers] == [*range(rows)], "every row once"
    assert all(row["num_generated_tokens"] == 4 and row["error"] is None for row in answers)
    assert sorted(path.name for path in files[0].parent.iterdir()) == sorted(path.name for path in files)


def test_killed_at_random(model: Path, tmp_path: Path) -> None:
    files = tmp_path / "in.parquet", tmp_path / "out.parquet"
    killed_five_times(str(model), files, 900, 1, lambda arguments: start(*arguments))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_with_a_model(seed: int, tmp_path: Path) -> None:
    import subprocess
    import sys

    files = tmp_path / "in.parquet", tmp_path / "out.parquet"

    def begin(arguments: list[str]) -> Any:
        return subprocess.Popen(
            [sys.executable, "-m", "jengine.cli", *arguments], stderr=subprocess.PIPE, text=True
        )

    killed_five_times("demo", files, 1000, seed, begin)
