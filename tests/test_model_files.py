"""Files that come with models: what is read, and what is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jengine.base import model_files
from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.model_files import malformed, parse_json, read_bytes, read_json, read_object, read_text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 1000 + "]" * 1000, "nested more than 64 deep"),
        ("[" * 1_000_000, "nested more than 64 deep"),
        ('{"a":' * 66 + "1" + "}" * 66, "nested more than 64 deep"),
        ("[NaN]", "not valid JSON: NaN is not a number of JSON"),
        ("[-Infinity]", "not valid JSON: -Infinity is not a number of JSON"),
        ("[1e999]", "not valid JSON: the number 1e999 is too large"),
        ("1" * 101, "a number has 101 digits; at most 100 are read"),
        (r'["\ud800"]', "has a lone surrogate"),
        (r'{"\udfff": 1}', "has a lone surrogate"),
        ("{", "not valid JSON: Expecting property name"),
        ("\ufeff{}", "not valid JSON: Unexpected UTF-8 BOM"),
    ],
)
def test_json_that_is_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelError, match=says) as caught:
        read_json(file)
    assert caught.value.file == file and str(caught.value).startswith(f"{file}: ")


def test_json_that_is_read(tmp_path: Path) -> None:
    deep = json.loads("[" * 64 + "]" * 64)
    value = {"a": [1, -2.5, int(1e30), None, True], "b": "\U0001f600\ud83d"[:1], "deep": deep}
    text = json.dumps(value)
    assert r"\ud83d\ude00" in text, "an escaped pair is a character"
    assert parse_json(text.encode(), "x") == value
    (tmp_path / "x.json").write_text(text)
    assert read_object(tmp_path / "x.json") == value


def test_other_files_are_refused_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for name, says in (
        ("pipe", "is not a regular file"),
        ("device", "is not a regular file"),
        ("folder", "is not a regular file"),
        ("loop", "cannot be read: Too many levels"),
        ("none", "is missing"),
        ("\0", "cannot be read: embedded null"),
    ):
        with pytest.raises(ModelError, match=says):
            read_bytes(tmp_path / name)
    with pytest.raises(ModelError, match="is not a regular file"):
        model_files.check_regular(tmp_path)
    (tmp_path / "list").write_text("[1]")
    with pytest.raises(ModelError, match="is not a JSON object"):
        read_object(tmp_path / "list")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="is not text in UTF-8"):
        read_text(tmp_path / "bytes")
    monkeypatch.setattr(model_files, "MAX_BYTES", 2)
    with pytest.raises(ModelError, match="has 3 bytes; at most 2 are read"):
        read_bytes(tmp_path / "list")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (KeyError("hidden_size"), "f: field 'hidden_size' is missing"),
        (OverflowError("too large"), "f: a field has the wrong type or value: too large"),
        (TypeError("not a number"), "f: a field has the wrong type or value: not a number"),
        (ModelError("is odd"), "f: is odd"),
        (ModelError("is odd", file="g"), "g: is odd"),
    ],
)
def test_errors_of_fields_name_the_file(error: Exception, says: str) -> None:
    with pytest.raises(ModelError) as caught, malformed("f"):
        raise error
    assert str(caught.value) == says


def test_errors_of_options_stay_their_own() -> None:
    with pytest.raises(InvalidArgument, match="size=3"), malformed("f"):
        raise InvalidArgument("size", 3, "must be less")


def test_what_an_error_repeats_of_a_file_is_cut() -> None:
    names = ", ".join(f"name-{i}" for i in range(20_000))
    error = ModelError(f"has several: {names}", file="f", tensor="x" * 10_000)
    assert len(str(error)) < 2300 and str(error).endswith("...") and len(error.tensor or "") == 200
