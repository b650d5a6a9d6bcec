"""A text's length gives a lower bound on its number of tokens, or the tokenizer reports that it does not."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from jengine.text.tokenizer import NFC_SHRINKS, most_bytes_of_a_token
from tests.text.conftest import byte_fallback, byte_level


def composing() -> tokenizers.Tokenizer:
    """Qwen's kind: canonical composition, then bytes."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


KINDS = [byte_level(), byte_fallback(), composing()]
PIECES = [
    "The", " quick", "fibonacci", " ", "世界", "\u03b9\u0308\u0301", "\u1112\u1161\u11ab", "<tool>", "</s>",
    "🙃", "é", "e\u0301", "\x00",
]  # fmt: skip
TEXTS = st.text(max_size=50) | st.lists(st.sampled_from(PIECES), max_size=50).map("".join)


@pytest.mark.parametrize("kind", range(len(KINDS)))
@given(text=TEXTS)
def test_no_token_stands_for_more(kind: int, text: str) -> None:
    most = most_bytes_of_a_token(KINDS[kind])
    assert most is not None
    assert len(KINDS[kind].encode(text, add_special_tokens=False).ids) * most >= len(text.encode())


def test_composition_shrinks_no_more() -> None:
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000:
            composed = len(unicodedata.normalize("NFC", chr(code)).encode())
            for longer in (chr(code), unicodedata.normalize("NFD", chr(code))):
                assert len(longer.encode()) <= NFC_SHRINKS * composed, hex(code)


def changed(change: Callable[[tokenizers.Tokenizer], object]) -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    change(tokenizer)
    return tokenizer


UNBOUNDED = {
    "an unknown token": tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")),
    "bytes that are not in the vocabulary": tokenizers.Tokenizer(models.BPE({"a": 0}, [])),
    "a normalizer that deletes": changed(lambda t: setattr(t, "normalizer", normalizers.Replace("a", ""))),
    "another normalizer": changed(
        lambda t: setattr(t, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]))
    ),
    "white space that is dropped": changed(
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.WhitespaceSplit())
    ),
    "a separator that is dropped": changed(
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split("a", "removed"))
    ),
    "a token that takes white space": changed(lambda t: t.add_tokens([AddedToken("<mask>", lstrip=True)])),
    "truncation": changed(lambda t: t.enable_truncation(8)),
}


@pytest.mark.parametrize("why", UNBOUNDED)
def test_where_length_says_nothing(why: str) -> None:
    assert most_bytes_of_a_token(UNBOUNDED[why]) is None
