"""Token masks: what bad_words and structured_outputs allow."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jengine.api.prompts import make_requests
from jengine.base.errors import InvalidArgument, JengineError
from jengine.core.request import SamplingParams
from jengine.core.structured_outputs import StructuredOutputs
from jengine.text.masks import AllowedTokens, BadWords, make_mask
from jengine.text.tokenizer import Tokenizer, bad_sequences


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    import jengine

    return Tokenizer.load(Path(jengine.__file__).parent / "demo")


def allowed(mask, size: int) -> set[int]:
    words = np.full(-(-size // 32), 0xFFFFFFFF, np.uint32)
    mask.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
    return set(np.flatnonzero(bits).tolist())


def walk(mask, tokenizer: Tokenizer, seed: int, most: int = 200) -> str:
    """Text of random allowed tokens, to the end-of-sequence."""
    rng, tokens = np.random.default_rng(seed), []
    for _ in range(most):
        token = int(rng.choice(sorted(allowed(mask, tokenizer.vocab_size))))
        mask.accept(token)
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(tokens)
        tokens.append(token)
    raise AssertionError(f"no end after {most} tokens: {tokenizer.decode(tokens)!r}")


def test_bad_words_end_where_they_would_be_complete() -> None:
    mask = BadWords([[7], [1, 2, 3], [2, 5]])
    everything = set(range(40))
    assert allowed(mask, 40) == everything - {7}
    mask.accept(1)
    mask.accept(2)
    assert allowed(mask, 40) == everything - {7, 3, 5}
    mask.accept(2)
    assert allowed(mask, 40) == everything - {7, 5}


@pytest.mark.parametrize("words", [["\n"], [" \t", "fine"], ["fine", "\u3000"]])
def test_bad_words_have_tokens(words: list[str], tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match=r"bad_words=.*not white space"):
        bad_sequences(words, tokenizer)
    with pytest.raises(InvalidArgument, match=r"bad_words=.*not white space"):
        make_requests(tokenizer, "x", SamplingParams(bad_words=words), "a", masks=False)


def test_every_end_waits_for_the_grammar() -> None:
    """Also one that is a word of the vocabulary, and may be in a string."""
    import jengine

    tokenizer = Tokenizer.load(Path(jengine.__file__).parent / "demo")
    [word] = tokenizer.encode(" tree", add_special_tokens=False)
    assert tokenizer.eos_token_id is not None
    ends = {tokenizer.eos_token_id, word}
    tokenizer.model_eos_token_ids = (word, tokenizer.eos_token_id, 10**9)
    mask = make_mask(SamplingParams(structured_outputs={"regex": '"[a-z ]{2,9}"'}), tokenizer)
    for token in tokenizer.encode('"abc"', add_special_tokens=False):
        assert mask is not None and not ends & allowed(mask, tokenizer.vocab_size) and not mask.is_complete()
        mask.accept(token)
    assert allowed(mask, tokenizer.vocab_size) == ends and mask.is_complete()
    mask.accept(word)  # as a draft that is not sampled
    allowed(mask, tokenizer.vocab_size)
    mask.rollback(1)
    assert allowed(mask, tokenizer.vocab_size) == ends


def test_bad_words_are_found_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    sequences = bad_sequences(["self"], tokenizer)
    assert [tokenizer.decode(sequence) for sequence in sequences] == ["self", " self"]


def test_masks_are_joined(tokenizer: Tokenizer) -> None:
    params = SamplingParams(
        allowed_token_ids=[10, 11, tokenizer.encode("self", False)[0]], bad_words=["self"]
    )
    assert allowed(make_mask(params, tokenizer), tokenizer.vocab_size) == {10, 11}
    assert make_mask(SamplingParams(), tokenizer) is None
    assert allowed(AllowedTokens([0, 63]), 64) == {0, 63}


@pytest.mark.parametrize("seed", range(5))
def test_regex(tokenizer: Tokenizer, seed: int) -> None:
    pattern = r"[0-9]{2,4}-(ab|cd)[x-z]"
    mask = make_mask(SamplingParams(structured_outputs=StructuredOutputs(regex=pattern)), tokenizer)
    assert re.fullmatch(pattern, walk(mask, tokenizer, seed))


def test_choice_and_grammar(tokenizer: Tokenizer) -> None:
    for what in (
        StructuredOutputs(choice=['a "b"', "ünïcode", "a"]),
        StructuredOutputs(grammar='start: "x" /[0-9]/ ("," /[0-9]/)~0..2'),
    ):
        for seed in range(5):
            text = walk(make_mask(SamplingParams(structured_outputs=what), tokenizer), tokenizer, seed)
            assert text in (what.choice or ()) or re.fullmatch(r"x[0-9](,[0-9]){0,2}", text)


def test_json_schema(tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "kind": {"enum": ["a", "b"]}},
        "required": ["n", "kind"],
        "additionalProperties": False,
    }
    for form in (schema, json.dumps(schema)):
        mask = make_mask(SamplingParams(structured_outputs=StructuredOutputs(json=form)), tokenizer)
        value = json.loads(walk(mask, tokenizer, 3, most=2000))
        assert set(value) == {"n", "kind"} and 0 <= value["n"] <= 9 and value["kind"] in ("a", "b")


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"choice": []},
        {"choice": [""]},
        {"choice": "a"},
        {"regex": 3},
        {"json": 3},
    ],
)
def test_what_is_no_structure_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="structured_outputs"):
        StructuredOutputs(**bad)  # type: ignore[arg-type]


def test_a_grammar_that_cannot_be_read_is_refused(tokenizer: Tokenizer) -> None:
    unreadable = [{"regex": "("}, {"grammar": "start: ~~"}, {"json": "{"}, {"json": {"enum": []}}]
    unreadable += [{"regex": "\ud800"}, {"json": {"const": {1, 2}}}]  # what cannot be handed over at all
    for what in (StructuredOutputs(**fields) for fields in unreadable):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="structured_outputs"):
            make_mask(SamplingParams(structured_outputs=what), tokenizer)


def test_what_becomes_too_complex_fails_and_does_not_end_as_if_complete(tokenizer: Tokenizer) -> None:
    what = StructuredOutputs(regex="(.{0,200}a.{0,200}b.{0,200}){5}")
    with pytest.raises(JengineError, match=r"structured_outputs: llguidance failed: .* too many") as caught:
        walk(make_mask(SamplingParams(structured_outputs=what), tokenizer), tokenizer, seed=0)
    assert "<state>" not in str(caught.value)


def test_structure_needs_an_end_of_sequence_token(tokenizer: Tokenizer) -> None:
    """llguidance would take token 0 for one."""
    nameless = Tokenizer(tokenizer.backend)
    with pytest.raises(InvalidArgument, match="no end-of-sequence token"):
        make_mask(SamplingParams(structured_outputs=StructuredOutputs(regex="a")), nameless)
