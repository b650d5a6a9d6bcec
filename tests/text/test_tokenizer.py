"""The tokenizer compared with transformers' for the same folder."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer

from jengine.base.errors import InvalidArgument, ModelError
from jengine.text.tokenizer import Tokenizer

TEXTS = ["def fibonacci(n):", "  naïve 你好 🙂\n\ttab", "", " ", "</s> inside", "unseen: Ж ß \x00"]


@pytest.mark.parametrize("folder", ["byte_level_folder", "byte_fallback_folder"])
def test_agrees_with_transformers(folder: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(folder)
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    assert (ours.vocab_size, ours.eos_token_id) == (len(theirs), theirs.eos_token_id)
    assert {theirs.bos_token_id, theirs.eos_token_id} <= ours.special_ids
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ids[0] == theirs.bos_token_id
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_text_of_one_token_shows_special_tokens(byte_level_folder: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_folder)
    assert tokenizer.eos_token_id is not None
    assert tokenizer.token_text(tokenizer.eos_token_id) == "</s>"
    assert tokenizer.token_text(tokenizer.encode("def", add_special_tokens=False)[0]) in "def"
    assert tokenizer.token_text(tokenizer.vocab_size) == "", "an id that only the model's padding has"


@pytest.mark.parametrize("folder", ["byte_level_folder", "byte_fallback_folder"])
@pytest.mark.parametrize("text", ["The fox 😀é中 ends", "你好 </s> x", " two  spaces", "naïve café\n\tIt"])
def test_bytes_of_tokens_join_to_the_text(folder: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer = Tokenizer.load(request.getfixturevalue(folder))
    before = tokenizer.encode("The end", add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert joined == tokenizer.decode([*before, *ids], False).removeprefix(tokenizer.decode(before, False))
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_limits_of_the_file_do_not_cut_prompts(byte_level_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_folder)
    tokenizer.backend.enable_truncation(3)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("one two three four five")) > 3


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "special": True}])
def test_end_of_sequence_is_read_from_either_file(
    byte_level_folder: Path, tmp_path: Path, eos: object
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_level_folder / "tokenizer.json").read_bytes())
    assert Tokenizer.load(tmp_path).eos_token_id is None
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": eos}))
    assert Tokenizer.load(tmp_path).eos_token_id == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    assert Tokenizer.load(tmp_path).eos_token_id == 1
    newer = {"eos_token": "<s>", "added_tokens_decoder": {"0": {"content": "<s>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(newer))
    assert Tokenizer.load(tmp_path).eos_token_id == 0


def test_older_files_go_through_transformers(byte_level_folder: Path, tmp_path: Path) -> None:
    model = json.loads((byte_level_folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "</s>",
        "bos_token": "<s>",
        "unk_token": "</s>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    older, newer = Tokenizer.load(tmp_path), Tokenizer.load(byte_level_folder)
    assert older.encode("def naïve", add_special_tokens=False) == newer.encode(
        "def naïve", add_special_tokens=False
    )
    assert older.eos_token_id == 1


def test_unreadable_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_loading_imports_neither_transformers_nor_jax(byte_level_folder: Path) -> None:
    code = (
        "import sys, pathlib; from jengine.text.tokenizer import Tokenizer;"
        " Tokenizer.load(pathlib.Path(sys.argv[1]));sys.exit(bool({'transformers', 'jax'} &"
        " set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, str(byte_level_folder)], check=True)


def test_text_that_is_no_unicode_is_refused(byte_level_folder: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"prompt='a.*must be text that UTF-8 can encode"):
        Tokenizer.load(byte_level_folder).encode("a\udc80")


def with_tokens(source: Path, folder: Path, tokens: dict[str, object]) -> Path:
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "added_tokens_decoder": tokens})
    )
    return folder


def test_tokens_that_only_the_configuration_has_are_added(byte_level_folder: Path, tmp_path: Path) -> None:
    plain = Tokenizer.load(byte_level_folder)
    size = plain.vocab_size
    tokens = {
        "0": {"content": "<s>", "special": True},
        str(size + 1): {"content": "<call>", "special": False, "normalized": False},
        str(size): {"content": "<end>", "special": True, "lstrip": False},
    }
    tokenizer = Tokenizer.load(with_tokens(byte_level_folder, tmp_path, tokens))
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.encode("a<end>b<call>", add_special_tokens=False)[1::2] == [size, size + 1]
    assert size in tokenizer.special_ids and size + 1 not in tokenizer.special_ids
    assert tokenizer.decode([size, size + 1]) == "<call>"


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        ({"5": {"content": "<end>"}}, r"has '<end>' at id 5, but in tokenizer.json it is '"),
        (
            {"99999": {"content": "<end>"}},
            r"has '<end>' at id 99999, but in tokenizer.json ids end before it",
        ),
        ({"many": {"content": "<end>"}}, "field"),
        ({"5": {}}, "field"),
        (["<end>"], "field"),
    ],
)
def test_tokens_that_cannot_be_added(
    tokens: Any, match: str, byte_level_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: .*{match}"):
        Tokenizer.load(with_tokens(byte_level_folder, tmp_path, tokens))


@pytest.mark.parametrize("folder", ["byte_level_folder", "byte_fallback_folder"])
@given(
    text=st.text(max_size=80)
    | st.lists(st.sampled_from(["<s>", "</s>", "<tool>", " The", "é", "\n"])).map("".join),
    special=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_unlocked_calls_give_the_same(
    request: pytest.FixtureRequest, folder: str, text: str, special: bool
) -> None:
    """Token ids of the library's `encode`, and the text of its `decode`."""
    tokenizer = Tokenizer.load(request.getfixturevalue(folder))
    ids = tokenizer.backend.encode(text, add_special_tokens=special).ids
    assert tokenizer.encode(text, special) == ids
    assert tokenizer.decode_unlocked(ids, special) == tokenizer.decode(ids, special)


@pytest.mark.parametrize("work", ["encode", "decode_unlocked"])
def test_long_texts_hold_no_other_thread_up(byte_level_folder: Path, work: str) -> None:
    tokenizer = Tokenizer.load(byte_level_folder)
    long = "The quick brown fox. " * 50_000 if work == "encode" else [70, 71] * 1_000_000
    thread = threading.Thread(target=getattr(tokenizer, work), args=(long,))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10, "with the interpreter's lock held, a few"


def test_tokens_that_other_files_name(tmp_path: Path) -> None:
    """Ids as transformers 5.23 gives them; a special token that the vocabulary lacks has none."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*letters, "<|end|>", "<|more|>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    fields = {"eos_token": "<|end|>", "pad_token": "[PAD]", "additional_special_tokens": ["<|more|>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<extra>": 258}))
    tokenizer = Tokenizer.load(tmp_path)
    found = {text: tokenizer.encode(text) for text in ("a<|end|>b", "a<|more|>b", "<extra>")}
    assert found == {"a<|end|>b": [64, 256, 65], "a<|more|>b": [64, 257, 65], "<extra>": [258]}
    assert tokenizer.eos_token_id == 256 and tokenizer.special_ids == {256, 257}
    named = {"eos_token": "<extra>", "additional_special_tokens": ["<|more|>", "<|end|>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    tokenizer = Tokenizer.load(tmp_path)  # this file decides
    assert tokenizer.eos_token_id == 258 and tokenizer.special_ids == {256, 257, 258}
    assert not tokenizer.backend.get_added_tokens_decoder()[258].normalized
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<extra>": 300}))
    with pytest.raises(ModelError, match=r"has '<extra>' at id 300, but in tokenizer.json ids end"):
        Tokenizer.load(tmp_path)
