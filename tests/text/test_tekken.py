"""Mistral's tekken.json, against byte-pair encoding by ranks at its plainest."""

from __future__ import annotations

import base64
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.base.errors import ModelError
from jengine.text.tekken import UNLISTED, read_tekken
from jengine.text.tokenizer import Tokenizer

PATTERN = r" ?[A-Za-z]+|[0-9]|\s+|[^A-Za-z0-9\s]+"
WORDS = [
    "th", "he", "in", " t", "the", " th", " the", "an", "and", "ing", " a", " an", " and", "ther", "her",
    " hea", "==", "\n\n", "é",
]  # fmt: skip
RANKED = [bytes([i]) for i in range(256)] + [word.encode() for word in WORDS] + [b"never a token"]
LISTED = [
    {"rank": 2, "token_str": "</s>", "is_control": True},
    {"rank": 0, "token_str": "<unk>", "is_control": True},
    {"rank": 1, "token_str": "<s>", "is_control": True},
    {"rank": 3, "token_str": "[THINK]", "is_control": False},
]


def write(folder: Path, listed: list[dict[str, Any]] | None = LISTED, special: int = 6) -> Path:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(RANKED)
    ]
    size = special + len(RANKED) - 1  # the last one is there, and not used
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(RANKED),
        "default_vocab_size": size,
        "default_num_special_tokens": special,
    }
    content = {"config": config, "vocab": vocab} | ({} if listed is None else {"special_tokens": listed})
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tekken"))


def by_rank(text: str) -> list[int]:
    """Each word's bytes, joined pair by pair, always the one of the lowest rank."""
    ids = []
    for word in re.findall(PATTERN, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            joined = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
            ranks = [RANKED.index(pair) if pair in RANKED[:-1] else len(RANKED) for pair in joined]
            if not ranks or min(ranks) == len(RANKED):
                break
            at = ranks.index(min(ranks))
            parts[at : at + 2] = [joined[at]]
        ids += [6 + RANKED.index(part) for part in parts]
    return ids


@given(text=st.text(alphabet="theaindrg 012\n=é", max_size=30))
def test_ids_are_those_of_byte_pairs_by_rank(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode(text, add_special_tokens=False) == by_rank(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("a</s>[THINK]<SPECIAL_5>") == [1, 6 + ord("a"), 2, 3, 5]
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (tokenizer.eos_token_id, tokenizer.special_ids) == (2, {0, 1, 2, 4, 5})
    assert tokenizer.decode([1, 6 + ord("a"), 3, 2]) == "a[THINK]"
    assert tokenizer.vocab_size == 6 + len(RANKED) - 1


def test_older_files_list_no_special_tokens(tmp_path: Path) -> None:
    backend, special = read_tekken(write(tmp_path, None, 1000) / "tekken.json")
    assert [backend.id_to_token(i) for i in (*range(len(UNLISTED)), 999)] == [*UNLISTED, "<SPECIAL_999>"]
    assert special["pad_token"] == "<pad>"


def test_template_of_the_folder_or_of_mistral_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "mistral_common.integrations.chat_templates.chat_templates"
    monkeypatch.setitem(sys.modules, name, None)
    assert Tokenizer.load(write(tmp_path)).chat_templates == {}
    stand_in = types.ModuleType(name)
    stand_in.convert_tokenizer_to_chat_template = lambda file: f"{{{{ bos_token }}}}[{file.name}]"  # type: ignore[attr-defined]
    for i in range(1, 4):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:i]), types.ModuleType("parent"))
    monkeypatch.setitem(sys.modules, name, stand_in)
    template = Tokenizer.load(tmp_path).chat_templates["default"]
    assert template.render([], add_generation_prompt=True) == "<s>[tekken.json]"
    (tmp_path / "chat_template.jinja").write_text("of the folder")
    assert Tokenizer.load(tmp_path).chat_templates["default"].source == "of the folder"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{}", "is not a tokenizer in Mistral's tekken format"),
        ('{"config": {"pattern": "("}, "vocab": []}', "is not a tokenizer"),
        (
            json.dumps({"config": {}, "vocab": [], "special_tokens": LISTED[:1]}),
            "the ranks of special_tokens have gaps",
        ),
    ],
)
def test_malformed_files_are_named(content: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(content)
    with pytest.raises(ModelError, match=rf"tekken\.json: .*{match}"):
        Tokenizer.load(tmp_path)
