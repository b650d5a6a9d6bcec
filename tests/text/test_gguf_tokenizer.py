"""Tokenizers in GGUF files: the ids and the text of the tokenizer that they were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from jengine.base.errors import ModelError
from jengine.text import gguf_tokenizer as read
from jengine.text.tokenizer import Tokenizer as Loaded
from jengine.text.tokenizer import has_tokenizer
from tests.checkpoints.gguf_models import write_gguf
from tests.text.conftest import byte_fallback, byte_level

TEXTS = [
    "def fibonacci(n):\n    return  12345 + 67",
    "naïve café, Grüße aus Köln; 你好，世界。🙂",
    "The fox <tool>and</s> the dog's end.\r\n\n",
    "",
    " leading and trailing ",
]


def described(tokenizer: Tokenizer, kind: str, **fields: Any) -> dict[str, Any]:
    """Fields of a GGUF file after tokenizer."""
    spec = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    added = {token["content"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    merges = [" ".join(merge) for merge in spec["model"]["merges"]]
    first = next(name for name in ("<s>",) if name in vocabulary)
    known = {
        "ggml.model": kind,
        "ggml.tokens": tokens,
        "ggml.token_type": [added.get(token, 1) for token in tokens],
    }
    if kind == "gpt2":
        known["ggml.merges"] = merges
    else:  # a merge's rank is its result's score
        ranks = {
            left + right: -float(rank)
            for rank, (left, right) in reversed([*enumerate(spec["model"]["merges"])])
        }
        known["ggml.scores"] = [ranks.get(token, 0.0) for token in tokens]
    ids = {"ggml.bos_token_id": vocabulary[first], "ggml.eos_token_id": vocabulary["</s>"]}
    return {**known, **ids, "ggml.add_bos_token": True, **fields}


def loaded(file: Path, fields: dict[str, Any]) -> Loaded:
    write_gguf(file, "llama_tied", tokenizer=fields)
    assert has_tokenizer(file)
    return Loaded.load(file)


def test_byte_level(tmp_path: Path) -> None:
    wanted = byte_level()
    found = loaded(tmp_path / "m.gguf", described(wanted, "gpt2", **{"ggml.pre": "gpt-2"}))
    for text in TEXTS:
        ids = wanted.encode(text).ids
        assert found.encode(text) == ids and found.decode(ids) == wanted.decode(ids)
    assert found.eos_token_id == wanted.token_to_id("</s>") and found.special_tokens["bos_token"] == "<s>"
    assert found.encode("x", add_special_tokens=False) == wanted.encode("x", add_special_tokens=False).ids
    assert found.max_token_bytes is not None
    for pre in "llama-bpe", "tekken":  # texts begin with BOS although the file does not say so
        fields = described(wanted, "gpt2", **{"ggml.pre": pre})
        del fields["ggml.add_bos_token"]
        found = loaded(tmp_path / f"{pre}.gguf", fields)
        assert found.encode("x")[0] == wanted.token_to_id("<s>")


def test_sentence_piece(tmp_path: Path) -> None:
    wanted = byte_fallback()
    found = loaded(tmp_path / "m.gguf", described(wanted, "llama", **{"ggml.unknown_token_id": 0}))
    for text in TEXTS[:2]:
        ids = wanted.encode(text).ids
        assert found.encode(text) == ids and found.decode(ids) == wanted.decode(ids) == text
    closed = loaded(
        tmp_path / "n.gguf",
        described(wanted, "llama", **{"ggml.add_space_prefix": False, "ggml.add_eos_token": True}),
    )
    assert closed.encode("the")[-1] == closed.eos_token_id and closed.decode(closed.encode("the")) == "the"
    assert "\u2581" not in closed.backend.encode("the").tokens[1]


def pieces(pre: str, text: str) -> list[str]:
    cut = pre_tokenizers.Split(Regex(read.SPLITS[pre]), behavior="isolated")
    return [piece for piece, _ in cut.pre_tokenize_str(text)]


def test_rules_cut_as_their_models_do() -> None:
    assert pieces("llama-bpe", "It's 12345  x\n\n!") == ["It", "'s", " ", "123", "45", " ", " x", "\n\n", "!"]
    assert pieces("qwen2", "We'RE 123") == ["We", "'RE", " ", "1", "2", "3"]
    assert pieces("tekken", "HelloWorld's 12/\n") == ["Hello", "World", "'s", " ", "1", "2", "/\n"]
    assert pieces("gpt-4o", "HelloWorld's 1234") == ["Hello", "World's", " ", "123", "4"]


def test_digits_stand_alone(tmp_path: Path) -> None:
    found = loaded(tmp_path / "m.gguf", described(byte_level(), "gpt2", **{"ggml.pre": "smollm"}))
    assert [piece for piece, _ in found.backend.pre_tokenizer.pre_tokenize_str("a 12b")] == [
        "a",
        "Ġ",
        "1",
        "2",
        "b",
    ]


def test_chat_templates(tmp_path: Path) -> None:
    templates = {
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "chat_template.tool_use": "tools: {{ tools }}",
    }
    found = loaded(
        tmp_path / "m.gguf", {**described(byte_level(), "gpt2", **{"ggml.pre": "gpt-2"}), **templates}
    )
    assert sorted(found.chat_templates) == ["default", "tool_use"]
    messages = [{"role": "user", "content": "Hi"}]
    assert found.chat_templates["default"].render(messages, add_generation_prompt=True) == "<s>Hi"
    write_gguf(tmp_path / "n.gguf", "llama_tied")
    assert read.read_chat_templates(tmp_path / "n.gguf") == {}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ggml.model": "bert"}, r"tokenizer\.ggml\.model='bert' is not supported; gpt2 and llama are"),
        ({"ggml.pre": "unheard-of"}, r"tokenizer\.ggml\.pre='unheard-of' is not supported; "),
        ({}, r"tokenizer\.ggml\.pre='default' is not supported"),
        (
            {"ggml.pre": "gpt-2", "ggml.merges": ["unheard of"]},
            r"m\.gguf: the tokenizer is inconsistent: .*`unheard` out of vocabulary",
        ),
        ({"ggml.model": "llama", "ggml.scores": [0.0]}, r"m\.gguf: the tokenizer is inconsistent"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        loaded(tmp_path / "m.gguf", {**described(byte_level(), "gpt2"), **fields})
    write_gguf(tmp_path / "none.gguf", "llama_tied")
    with pytest.raises(ModelError, match=r"field tokenizer\.ggml\.model is missing"):
        Loaded.load(tmp_path / "none.gguf")
