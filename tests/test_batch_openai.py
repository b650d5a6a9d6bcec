"""`jengine generate --input` with OpenAI's batch files, compared with the expected output; and the order of
the work.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from jengine import SamplingParams, Tokenizer, cli
from jengine.commands import batch
from jengine.commands.batch_lines import Line
from jengine.core.updates import Ended
from tests.batch_mocks import make_tokenizer, use_mock
from tests.mocks.mock_engine import MockEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def command(model: Path, files: tuple[Path, Path], *more: str) -> list[str]:
    return ["generate", str(model), f"--input={files[0]}", f"--output={files[1]}", "--quiet", *more]


def asked(name: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"max_tokens": 4, **body}}


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# a line, and how it fails: (status, message), or before it is asked
LINES: list[tuple[Any, tuple[int, str] | str | None]] = [
    (asked("chat", CHAT, model="served", messages=HELLO), None),
    (asked("text", prompt="quick fox", seed=7, user="me"), None),
    (asked("ids", prompt=[5, 6, 7], logprobs=1), None),
    (asked("several", prompt=["x", "yy"], stop="never", n=2, temperature=1), None),
    (asked("model", prompt="x", model="gpt-9"), (404, "this server has one model: served")),
    (asked("nowhere", "/v1/nothing", prompt="x"), (404, "POST /v1/nothing: Not Found")),
    (asked("unknown", prompt="x", temprature=1), (400, "temprature=1")),
    (asked("wrong", CHAT, messages="hello"), (400, "messages")),
    (asked("long", prompt=[5] * 2000), (400, "prompt")),
    (
        asked("stream", prompt="x", stream=True),
        "body.stream=True: must be false: batch answers are not streamed",
    ),
    (asked("text", prompt="again"), "custom_id='text': an earlier line has this custom_id"),
    ({**asked("get", prompt="x"), "method": "GET"}, "method='GET': must be POST"),
    ({**asked("url", prompt="x"), "url": "http://x/"}, "url='http://x/': must be a path"),
    (
        {**asked("more", prompt="x"), "priority": 1},
        "priority=1: a batch file's lines may only have custom_id, method, url, body",
    ),
    ({"method": "POST", "url": TEXT, "body": {"prompt": "x"}}, "custom_id=None: must be text"),
    ({"custom_id": "b", "method": "POST", "url": TEXT}, "body=None: must be an object"),
    ("[1]", "must be a JSON object: [1]"),
    ('{"custom_id"', "delimiter"),
]


def test_expected_output(
    model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = use_mock(monkeypatch)
    files[0].write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line, _ in LINES))
    run = command(model, files, "--served-model-name=served")
    assert cli.main(run) == 1
    answers = {answer["id"]: answer for answer in records(files[1])}
    assert len(answers) == len(records(files[1])) == len(LINES)
    for number, (line, expected) in enumerate(LINES, start=1):
        answer = answers[f"batch_req_{number}"]
        assert [*answer] == ["id", "custom_id", "response", "error"]
        if isinstance(expected, str):
            assert (
                answer["response"] is None
                and answer["error"]["code"] == "invalid_request"
                and expected in answer["error"]["message"]
            )
            continue
        assert answer["custom_id"] == line["custom_id"] and answer["error"] is None
        assert [*answer["response"]] == ["status_code", "request_id", "body"]
        assert answer["response"]["status_code"] == (200 if expected is None else expected[0])
        if expected is not None:
            assert expected[1] in answer["response"]["body"]["error"]["message"]
    told = capsys.readouterr().err
    assert (
        "jengine: line 5: this server has one model: served" in told
        and "jengine: line 10: body.stream" in told
    )

    tokenizer = Tokenizer.load(model)
    bodies = {
        answer["custom_id"]: answer["response"]["body"] for answer in answers.values() if answer["response"]
    }
    chat = ChatCompletion.model_validate(bodies["chat"])
    ids = tokenizer.encode("<s>user: hello\n<s>assistant:", add_special_tokens=False)
    assert (
        chat.choices[0].message.content == tokenizer.decode(ids[:4])
        and chat.model == "served"
        and chat.id.startswith("chatcmpl-")
    )
    assert chat.usage is not None and (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (
        len(ids),
        4,
    )
    several = Completion.model_validate(bodies["several"])
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3] and several.usage is not None
    assert several.usage.completion_tokens == 16
    scored = Completion.model_validate(bodies["ids"]).choices[0]
    assert (
        scored.text == tokenizer.decode([5, 6, 7, 5])
        and scored.logprobs is not None
        and scored.logprobs.token_logprobs == [-0.5] * 4
    )

    content = files[1].read_bytes()
    assert cli.main(run) == 1 and files[1].read_bytes() == content and len(engines) == 1


def test_goes_on_where_it_stopped(
    model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch continues wherever its output was cut off; failed lines are retried on request."""
    use_mock(monkeypatch)
    lines = [
        asked("a", prompt="one"),
        asked("b", prompt=[]),
        {"url": TEXT, "body": {}},
        asked("d", CHAT, messages=HELLO),
    ]
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(command(model, files)) == 1
    content = files[1].read_bytes()
    for cut in (0, 7, len(content) // 2, len(content) - 1):
        files[1].write_bytes(content[:cut])
        assert cli.main(command(model, files)) == 1
        assert sorted(answer["id"] for answer in records(files[1])) == [
            f"batch_req_{number}" for number in (1, 2, 3, 4)
        ]
        assert files[1].read_bytes().startswith(content[: content.rfind(b"\n", 0, cut) + 1])
    lines[1:3] = [asked("b", prompt="two"), asked("c", prompt="three")]
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(command(model, files, "--retry-errors")) == 0
    assert sorted(answer["custom_id"] for answer in records(files[1])) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("form", ["openai", "jsonl"])
def test_a_generation_that_fails_is_no_answer(
    form: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out"
    own = form == "jsonl"
    lines = [{"prompt": f"{i}"} if own else asked(str(i), prompt=f"row {i}") for i in range(2)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = ["generate", str(model), f"--input={source}", f"--output={target}", "--quiet"]
    engines = use_mock(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(MockEngine, "_update", lambda _, name, __: Ended(name, "error", "no token is allowed"))
        assert cli.main(run) == 1
    assert target.read_text().count("without an answer") == 2 and "no token is allowed" in target.read_text()
    assert cli.main(run) == 1 and len(engines) == 1, "nothing to do, but there are errors"
    assert cli.main([*run, "--retry-errors"]) == 0 and len(engines) == 2
    assert "without an answer" not in target.read_text()


def test_an_engine_that_dies_is_no_answer(
    model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_text("".join(json.dumps(asked(str(i), prompt=f"row {i}")) + "\n" for i in range(40)))
    with monkeypatch.context() as patch:
        use_mock(patch, fail_at=6, max_num_seqs=4)
        assert cli.main(command(model, files)) == 2
    assert "jengine: error: " in capsys.readouterr().err
    assert 0 < len(records(files[1])) < 40 and all(
        answer["response"]["status_code"] == 200 for answer in records(files[1])
    )
    use_mock(monkeypatch)
    assert cli.main(command(model, files)) == 0
    assert sorted(int(answer["custom_id"]) for answer in records(files[1])) == [*range(40)]


def test_such_files_take_no_sampling_flags(
    model: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_text(json.dumps(asked("a", prompt="one")))
    assert cli.main(command(model, files, "--temperature=0")) == 2
    assert "temperature=0.0: cannot be given with an OpenAI batch file" in capsys.readouterr().err
    assert not files[1].exists()


# --- the order of the work ------------------------------------------------------------------------


def test_prompts_that_begin_alike_share_pages(
    model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache that holds few prefixes, most of each shared beginning is found; in the file's order it
    would not be.
    """
    prefixes = [f"{i} " + chr(ord("a") + i % 26) * 300 for i in range(12)]
    prompts = [prefix + f" question {i}" for prefix in prefixes for i in range(6)]
    random.Random(5).shuffle(prompts)
    files[0].write_text("".join(json.dumps({"prompt": prompt, "max_tokens": 2}) + "\n" for prompt in prompts))
    found = []
    for order in (batch.ordered, iter):
        monkeypatch.setattr("jengine.commands.batch.ordered", order)
        engines = use_mock(monkeypatch, pages=80, max_num_seqs=2)
        assert cli.main(command(model, files)) == 0
        files[1].unlink()
        found.append(engines[0].load)
    ordered, plain = found
    assert ordered.prefix_queries == plain.prefix_queries
    assert ordered.prefix_hits > 0.7 * ordered.prefix_queries > 2 * plain.prefix_hits


def lines(*prompts: Any, most: int = 1) -> list[Line]:
    return [
        Line(number, None, "prompt", prompt, SamplingParams(max_tokens=most))
        for number, prompt in enumerate(prompts, start=1)
    ]


def test_each_line_once_and_long_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = "s" * 300
    given = lines("short", shared + "b", "x" * 200, shared + "a", "y" * 800, "short")
    assert [line.number for line in batch.ordered(given)] == [5, 4, 2, 3, 1, 6]
    several = [
        Line(9, error="wrong"),
        *lines([5, 6]),
        Line(8, "c", CHAT, {"messages": HELLO, "max_tokens": 5000}),
    ]
    assert [line.number for line in batch.ordered(several)] == [8, 1, 9]
    monkeypatch.setattr(batch, "WINDOW", 2)
    assert [line.number for line in batch.ordered(given)] == [2, 1, 4, 3, 5, 6]
    monkeypatch.setattr(batch, "WINDOW_CHARACTERS", 100)
    assert [line.number for line in batch.ordered(given)] == [2, 1, 3, 4, 5, 6]
