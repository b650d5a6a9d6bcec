"""`jengine generate --input`: every line is answered exactly once, whatever its content and whenever the
process is killed."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jengine
from jengine import LLM, EngineDead, InvalidArgument, JengineError, SamplingParams, cli
from jengine.commands import batch
from jengine.commands.batch_lines import OutputFile, own_format
from jengine.core.request import CompletionOutput, RequestOutput
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL

OPTIONS = {**SMALL, "max_model_len": 192}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
output_file = partial(OutputFile, form=own_format({}))
FEW_PROGRAMS = [*FLAGS, "--batch-invariant"]  # for processes, which compile them all


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(model: object, files: tuple[Path, Path], *more: str) -> list[str]:
    return ["generate", str(model), f"--input={files[0]}", f"--output={files[1]}", *more]


def test_killed_and_restarted(text_model: Path, files: tuple[Path, Path]) -> None:
    """A process is killed with some lines answered and others in progress. The last answer is cut off;
    another process continues.
    """
    source, target = files
    keys = [f"id {number}" if number % 2 else number for number in range(1, 121)]  # by id, or by line number
    lines = [
        {"id": key, "prompt": f"{key}"} if isinstance(key, str) else {"prompt": f"{key}"} for key in keys
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [*FEW_PROGRAMS, "--max-tokens=100", "--temperature=0", "--ignore-eos"]
    arguments = [sys.executable, "-m", "jengine.cli", *command(text_model, files, *flags)]

    with subprocess.Popen(arguments, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 120
        while not target.exists() or target.read_bytes().count(b"\n") < 20:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    target.write_bytes(target.read_bytes()[:-9])
    before = target.read_bytes().count(b"\n")
    assert 15 < before < 120, "it had answered everything before it was killed"

    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "the last line was incomplete and is answered again" in done.stderr
    assert f"\n{120 - before} of 120 lines answered; " in done.stderr and "tokens/s" in done.stderr
    answers = records(target)
    assert sorted(str(answer.get("id", answer["line"])) for answer in answers) == sorted(
        str(key) for key in keys
    )
    assert all(len(answer["outputs"][0]["token_ids"]) == 100 for answer in answers)

    content = target.read_bytes()
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stderr == "nothing to do: 120 lines answered before\n" and target.read_bytes() == content


LINES: list[tuple[bytes, dict[str, Any] | str]] = [  # a line, and its record or a part of its error
    (b'{"prompt": "The quick", "id": "a"}', {"line": 1, "id": "a", "prompt_tokens": 3}),
    (
        b'{"prompt_token_ids": [5, 6, 7], "custom_id": 17, "max_tokens": 3}',
        {"line": 2, "id": 17, "prompt_tokens": 3},
    ),
    (
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages[0].content }}y"}',
        {"line": 3, "prompt_tokens": 2},
    ),
    (
        b'{"prompt": "The quick", "seed": 3, "temperature": 1.0, "logprobs": 1, "prompt_logprobs": 0}',
        {"line": 4, "prompt_tokens": 3},
    ),
    (b"  ", ""),
    (b'{"prompt": "The', "Unterminated string"),
    (b'"prompt"', 'must be a JSON object: "prompt"'),
    (b'{"prompt": "\xff"}', "invalid start byte"),
    (b"[" * 10_000, "is not JSON: it is nested too deeply"),
    (b'{"text": "x"}', 'must have one of prompt, prompt_token_ids, messages; it has 0: {"text": "x"}'),
    (b'{"prompt": "x", "messages": []}', "it has 2"),
    (b'{"prompt": "x", "id": "a"}', "id='a': an earlier line has this id"),
    (b'{"prompt": "x", "id": 1.5}', "must be one text or whole number"),
    (b'{"prompt": "x", "id": "b", "custom_id": "b"}', "must be one text or whole number"),
    (b'{"prompt": "x", "temprature": 1}', "temprature=1: there is no such field"),
    (b'{"prompt": "x", "tools": []}', "tools=[]: there is no such field for this kind of prompt"),
    (b'{"prompt": "x", "id": "c", "top_p": 7}', "top_p=7: must be in (0, 1]"),
    (b'{"prompt": "x", "stop": 7}', "stop=7"),
    (b'{"prompt": 7}', "prompt=7: must be text"),
    (b'{"prompt": "\\ud800"}', "must be text that UTF-8 can encode"),
    (b'{"prompt_token_ids": "x"}', "must be a list"),
    (b'{"prompt_token_ids": [5000]}', "ids must be in [0, "),
    (b'{"prompt": "' + b"x" * 192 + b'"}', "at most max_model_len - 1 = 191"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', "the model has no chat template"),
    (b'{"messages": [{"role": "usr", "content": "x"}], "chat_template": "x"}', "must be one of system"),
    (b'{"prompt": "The quick", "n": 2}', "n=2: must be 1 if temperature is 0"),
    (b'{"prompt": "The quick", "n": 3, "seed": 3, "temperature": 1.0}', {"line": 27, "prompt_tokens": 3}),
    (b'{"prompt": "The quick"}', {"line": 28, "prompt_tokens": 3}),  # without a line's end
]


def test_lines_of_every_kind(
    text_model: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = files
    source.write_bytes(b"\n".join(line for line, _ in LINES))
    run = command(text_model, files, *FLAGS, "--max-tokens=5", "--temperature=0", "--quiet")
    with on_demand():
        assert cli.main(run) == 1
    told = capsys.readouterr().err
    answers = {answer["line"]: answer for answer in records(target)}
    assert len(answers) == len(records(target)) == len(LINES) - 1
    for number, (_, expected) in enumerate(LINES, start=1):
        answer = answers.get(number)
        if isinstance(expected, dict):
            assert answer is not None and {field: answer.get(field) for field in expected} == expected
            assert answer.keys() - expected.keys() == {"outputs"} | (
                {"prompt_logprobs"} if number == 4 else set()
            )
        elif expected:
            assert answer is not None and expected in answer["error"] and "outputs" not in answer
            assert f"jengine: line {number}: " in told
    assert answers[17]["id"] == "c" and "id" not in answers[12]

    with on_demand():
        llm = LLM(text_model, progress=False, **OPTIONS)  # type: ignore[arg-type]
    work: list[tuple[int, Any, SamplingParams]] = [
        (1, "The quick", SamplingParams(temperature=0.0, top_p=0.95, max_tokens=5)),
        (2, [5, 6, 7], SamplingParams(temperature=0.0, top_p=0.95, max_tokens=3)),
        (
            4,
            "The quick",
            SamplingParams(temperature=1.0, top_p=0.95, max_tokens=5, seed=3, logprobs=1, prompt_logprobs=0),
        ),
        (27, "The quick", SamplingParams(temperature=1.0, top_p=0.95, max_tokens=5, seed=3, n=3)),
    ]
    for line, prompt, params in work:
        for shown, made in zip(
            answers[line]["outputs"], llm.generate(prompt, params, use_tqdm=False)[0].outputs, strict=True
        ):
            expected = {
                name: getattr(made, name)
                for name in ("index", "text", "token_ids", "finish_reason", "stop_reason")
            }
            assert {name: shown.get(name) for name in expected} == expected
            assert ("logprobs" in shown) == (params.logprobs is not None)
    [scored] = answers[4]["outputs"]
    assert [int(token) for entry in scored["logprobs"] for token in list(entry)[:1]] == scored["token_ids"]

    assert answers[4]["prompt_logprobs"][0] is None and len(answers[4]["prompt_logprobs"]) == 3

    content = target.read_bytes()
    assert cli.main(run) == 1 and target.read_bytes() == content and capsys.readouterr().err == ""
    with source.open("ab") as file:  # more work, later
        file.write(b'\n{"prompt": "x", "id": "later"}\n')
    with on_demand():
        assert cli.main(run) == 1, "lines that failed before count"
    assert [answer.get("id") for answer in records(target)[len(answers) :]] == ["later"]


# --- the file of answers --------------------------------------------------------------------------


def test_whatever_was_cut_off_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written = [
        {"line": 1, "outputs": []},
        {"line": 2, "id": "zwei", "error": "x"},
        {"line": 3, "id": 3, "outputs": []},
    ]
    with output_file(path) as answers:
        answers.write(written[:1])
        answers.write(written[1:])
    whole, keys = path.read_bytes(), [("line", 1), ("id", "zwei"), ("id", 3)]
    assert records(path) == written
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n")
        with output_file(path) as answers:
            assert answers.done == set(keys[:complete])
            answers.write(written[complete:])
        assert path.read_bytes() == whole
    path.write_bytes(whole + b"\0" * 100)  # what some file systems leave after a power failure
    with output_file(path) as answers:
        assert answers.done == set(keys)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [b"my notes", b"my notes\n", b"{}\n", b'{"line": 1}\n\n{"line": 2}\n', b"[]", b"7\n", b'{"line": []}\n'],
)
def test_a_file_with_something_else_is_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match="is not an answer of this command; choose another file"):
        output_file(path)
    assert path.read_bytes() == content


def test_one_process_at_a_time_may_write(tmp_path: Path) -> None:
    with output_file(tmp_path / "out"), pytest.raises(InvalidArgument, match="another process is writing it"):
        output_file(tmp_path / "out")
    with output_file(tmp_path / "out"):
        pass


@pytest.mark.parametrize(
    "source, target, message",
    [
        ("missing", "out", "input='.*: cannot be read: No such file"),
        ("table.csv", "out", "input='.*: must be JSON lines or an OpenAI batch file: convert .csv files"),
        ("here", "here", "must be another file than --input"),
        ("here", "missing/out", "cannot be written: No such file"),
        ("here", ".", "cannot be written: Is a directory"),
        ("x" * 300, "out", "input='.*: cannot be read: File name too long"),
    ],
)
def test_files_that_cannot_be(source: str, target: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "here").write_text('{"prompt": "x"}\n')
    options = cli._parser().parse_args(command("demo", (tmp_path / source, tmp_path / target)))
    with pytest.raises(InvalidArgument, match=message):
        batch.run(options)
    assert (tmp_path / "here").read_text() == '{"prompt": "x"}\n'


def test_answers_may_be_thrown_away() -> None:
    with output_file(Path(os.devnull)) as output:
        output.write([{"custom_id": "1"}])


# --- a stand-in for the engine --------------------------------------------------------------------


class StandIn:
    """Answers immediately, or fails on request; counts concurrent requests."""

    fail_at = 0
    live = most = asked = 0

    def __init__(self, model: str, **options: Any) -> None:
        self.backend = SimpleNamespace(limits=SimpleNamespace(max_num_seqs=4))

    async def __aenter__(self) -> StandIn:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def generate(
        self, prompt: str, params: SamplingParams, output_kind: str
    ) -> AsyncIterator[RequestOutput]:
        cls = type(self)
        cls.asked, cls.live = cls.asked + 1, cls.live + 1
        cls.most = max(cls.most, cls.live)
        await asyncio.sleep(0)
        if cls.fail_at and cls.asked >= cls.fail_at:
            raise EngineDead("the engine has stopped: it was told to")
        cls.live -= 1
        yield RequestOutput(
            request_id="0",
            prompt=prompt,
            prompt_token_ids=[1],
            outputs=[CompletionOutput(text=prompt, token_ids=[1, 2])],
        )


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    class Fresh(StandIn):
        pass

    monkeypatch.setattr(jengine, "AsyncLLM", Fresh, raising=False)
    return Fresh


def test_few_requests_are_in_memory_at_a_time(
    stand_in: type[StandIn], files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files[0].write_text("".join(json.dumps({"prompt": str(number)}) + "\n" for number in range(500)))
    read, ahead = 0, []
    lines = batch.numbered

    def counted(path: Path) -> Any:
        nonlocal read
        for line in lines(path):
            read += 1
            ahead.append(read - files[1].read_bytes().count(b"\n") if files[1].exists() else 0)
            yield line

    monkeypatch.setattr(batch, "numbered", counted)
    monkeypatch.setattr(batch, "WINDOW", 16)
    assert cli.main(command("demo", files, "--quiet")) == 0
    assert len(records(files[1])) == 500 and stand_in.most <= 8 and max(ahead) <= 16 + 9


def test_failed_lines_are_answered_again_on_request(
    stand_in: type[StandIn], files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = files
    source.write_text('{"prompt": "a"}\n{"prompt": 7}\n{"prompt": "c"}\n{"id": "d"}\n')
    assert cli.main(command("demo", files)) == 1
    assert "2 of 4 lines answered, 2 failed; " in capsys.readouterr().err
    target.chmod(0o640)
    assert cli.main(command("demo", files)) == 1, "as the file still has errors"
    told = (
        "nothing to do: 4 lines answered before, 2 of them with an error: --retry-errors answers these"
        " again\n"
    )
    assert capsys.readouterr().err == told
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n{"id": "d", "prompt": "d"}\n')
    fresh = Path(f"{target}.retry")
    fresh.mkdir()  # as in a folder in which nothing can be made
    assert cli.main(command("demo", files, "--quiet", "--retry-errors")) == 2
    assert "out.jsonl.retry cannot be written beside it: Is a directory" in capsys.readouterr().err
    fresh.rmdir()
    assert cli.main(command("demo", files, "--quiet", "--retry-errors")) == 0
    assert sorted((answer["line"], answer["outputs"][0]["text"]) for answer in records(target)) == [
        *enumerate("abcd", start=1)
    ]
    assert stand_in.asked == 4, "what had been answered was not asked again"
    assert target.stat().st_mode & 0o777 == 0o640 and sorted(
        path.name for path in target.parent.iterdir()
    ) == ["in.jsonl", "out.jsonl"]


def test_standard_input_to_standard_output(
    stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n\n{"prompt": 7}\n')))
    assert cli.main(["generate", "demo", "--input=-"]) == 1
    out, err = capsys.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["line"] for answer in answers] == [1, 3] or [answer["line"] for answer in answers] == [
        3,
        1,
    ]
    last = err.replace("\r", "\n").splitlines()[-1]  # a bar may have been shown and cleared before it
    assert last.startswith("1 of 2 lines answered, 1 failed; 2 tokens, ") and last.endswith("tokens/s")


def test_whoever_writes_the_input_may_wait_for_answers(
    stand_in: type[StandIn], files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    answered = []

    def converse() -> None:
        with open(writing, "w") as lines:
            for number in range(3):
                print(json.dumps({"prompt": str(number)}), file=lines, flush=True)
                deadline = time.monotonic() + 30  # without the answer, the end of the input brings it
                while len(records(files[1])) <= number and time.monotonic() < deadline:
                    time.sleep(0.001)
                answered.append(len(records(files[1])))

    files[1].touch()
    producer = threading.Thread(target=converse)
    with open(reading) as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        producer.start()
        assert cli.main(["generate", "demo", "--input=-", f"--output={files[1]}", "--quiet"]) == 0
    producer.join()
    assert answered == [1, 2, 3]


def test_a_full_disk_leaves_what_was_written(tmp_path: Path) -> None:
    """A limit on the size of files replaces the full disk."""
    path, before = tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    message = r"out\.jsonl: cannot be written: File too large; run the command again to continue"
    try:
        with pytest.raises(JengineError, match=message), output_file(path) as answers:
            answers.write([{"line": 1, "outputs": []}])
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
            answers.write([{"line": 2, "outputs": []}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with output_file(path) as answers:
        assert answers.done == {("line", 1)}


def test_an_engine_that_dies_leaves_what_was_answered(
    stand_in: type[StandIn], files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_text('{"prompt": "x"}\n' * 100)
    stand_in.fail_at = 50
    assert cli.main(command("demo", files, "--quiet")) == 2
    assert capsys.readouterr().err == "jengine: error: the engine has stopped: it was told to\n"
    before = len(records(files[1]))
    assert 20 < before < 50
    stand_in.fail_at = 0
    assert cli.main(command("demo", files)) == 0
    assert f"{100 - before} of 100 lines answered; {2 * (100 - before)} tokens, " in capsys.readouterr().err
    assert sorted(answer["line"] for answer in records(files[1])) == [*range(1, 101)]
