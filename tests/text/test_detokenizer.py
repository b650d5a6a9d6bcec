"""Incremental detokenising against decoding everything at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jengine.text import detokenizer
from jengine.text.detokenizer import MAX_HELD
from jengine.text.tokenizer import Tokenizer

HARD = ["👩‍👩‍👧 é e\u0301", "你好，世界", "  two  spaces ", "\ufffd\ufffd", "🙂" * 20, "<tool> <s>"]
# A real U+FFFD looks like a broken character, so many in a row outlast MAX_HELD.
texts = (st.text(max_size=40) | st.text(alphabet="aé你🙂\u0301\ufffd \n<s>▁", max_size=40)).filter(
    lambda text: "\ufffd\ufffd" not in text
)


@pytest.fixture(scope="module")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.load(byte_level_folder)


@pytest.fixture(scope="module")
def byte_fallback(byte_fallback_folder: Path) -> Tokenizer:
    return Tokenizer.load(byte_fallback_folder)


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.detokenizer()
    return [*(stream.push([i]) for i in ids), stream.flush()]


def grouped(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> str:
    """The text of tokens that arrive in groups of these sizes."""
    stream, at, out = tokenizer.detokenizer(), 0, ""
    for size in [*sizes, len(ids)]:
        out, at = out + stream.push(ids[at : at + size]), at + size
    return out + stream.flush()


def single_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text as tokens of one byte each, as a model may write it."""
    vocab = tokenizer.backend.get_vocab()
    if "<0x00>" in vocab:
        return [vocab[f"<0x{byte:02X}>"] for byte in text.encode()]
    characters = {byte: c for c, byte in detokenizer._byte_of_character().items()}
    return [vocab[characters[byte]] for byte in text.encode()]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_joined_deltas_are_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)

    @given(st.lists(st.tuples(texts, st.booleans()), max_size=4), st.lists(st.integers(0, 20), max_size=5))
    @example([(text, True) for text in HARD], [2, 17])
    @example([(text, False) for text in HARD], [])
    def check(parts: list[tuple[str, bool]], sizes: list[int]) -> None:
        ids: list[int] = []
        for text, as_bytes in parts:
            ids += single_bytes(tokenizer, text) if as_bytes else tokenizer.encode(text)
        out = deltas(tokenizer, ids)
        assert "".join(out) == tokenizer.decode(ids)
        assert grouped(tokenizer, ids, sizes) == "".join(out)
        if not any("\ufffd" in text for text, _ in parts):
            assert not any("\ufffd" in delta for delta in out), "half a character was emitted"

    check()


def test_byte_level_is_exact_for_any_ids(byte_level: Tokenizer) -> None:
    """A model with random weights may generate anything: broken UTF-8, special ids, ids beyond the
    tokenizer's vocabulary.
    """

    @given(
        st.lists(
            st.integers(0, byte_level.vocab_size + 20) | st.sampled_from(single_bytes(byte_level, "🙂é")),
            max_size=60,
        )
    )
    def check(ids: list[int]) -> None:
        assert "".join(deltas(byte_level, ids)) == byte_level.decode(ids)

    check()


def test_byte_fallback_survives_any_ids(byte_fallback: Tokenizer) -> None:
    """Broken bytes become U+FFFD, possibly fewer than when decoded at once. Other characters are kept, and
    all text is emitted.
    """

    @given(st.lists(st.integers(0, byte_fallback.vocab_size + 20), max_size=60))
    def check(ids: list[int]) -> None:
        out = deltas(byte_fallback, ids)
        streamed, whole = "".join(out), byte_fallback.decode(ids)
        kept = iter(streamed)
        assert all(c in kept for c in whole.replace("\ufffd", "")), "a character was lost"

    check()
    broken = single_bytes(byte_fallback, "🙂")[1:2] * (3 * MAX_HELD)
    assert deltas(byte_fallback, broken)[-1] == ""
    assert "".join(deltas(byte_fallback, broken)) == byte_fallback.decode(broken)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_unfinished_character_waits_for_flush(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    stream = tokenizer.detokenizer()
    assert [stream.push([i]) for i in single_bytes(tokenizer, "🙂")] == ["", "", "", "🙂"]
    for i in single_bytes(tokenizer, "🙂")[:3]:
        assert stream.push([i]) == ""
    assert set(stream.flush()) == {"\ufffd"}
    assert stream.flush() in ("", "\ufffd" * 3)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_cost_of_a_token_does_not_grow(kind: str, request: pytest.FixtureRequest) -> None:
    """Work is counted, not timed: how many tokens are decoded or looked up for each one pushed."""
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("def fibonacci(n): return 你好 🙂 " * 50)
    work = 0
    inner_decode, inner_bytes = tokenizer.decode, tokenizer._bytes_of

    def decode(ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal work
        work += len(ids)
        return str(inner_decode(ids, skip_special_tokens))

    def bytes_of(token_id: int) -> bytes:
        nonlocal work
        work += 1
        return bytes(inner_bytes(token_id))

    tokenizer.decode, tokenizer._bytes_of = decode, bytes_of
    try:
        deltas(tokenizer, ids)
    finally:
        del tokenizer.decode, tokenizer._bytes_of
    assert 0 < work <= 3 * MAX_HELD * len(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_after_a_prompt_a_space_at_the_start_stays(kind: str, request: pytest.FixtureRequest) -> None:
    """A text and its continuation, cut anywhere, concatenate to the decoded text of all ids."""
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. The end of the story is the end.")
    for cut in range(1, len(ids)):
        stream = tokenizer.detokenizer(after=ids[:cut])
        continuation = "".join([*(stream.push([token]) for token in ids[cut:]), stream.flush()])
        assert tokenizer.decode(ids[:cut]) + continuation == tokenizer.decode(ids)
