"""Token masks: what parameters allow next that depends on the tokens so far, worked out on the host while the device works."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable

import llguidance
import numpy as np

from jengine.errors import InvalidArgument, JengineError
from jengine.request import SamplingParams, StructuredOutputs, TokenMask
from jengine.text.tokenizer import Tokenizer


def make_mask(params: SamplingParams, tokenizer: Tokenizer) -> TokenMask | None:
    """The mask that a request needs, a fresh one, or None.

    Raises:
        InvalidArgument: a grammar that cannot be read.
    """
    masks: list[TokenMask] = []
    if params.allowed_token_ids is not None:
        masks.append(AllowedTokens(params.allowed_token_ids))
    if params.bad_words:
        masks.append(BadWords(bad_sequences(params.bad_words, tokenizer)))
    if isinstance(params.structured_outputs, StructuredOutputs):
        masks.append(Grammar(params.structured_outputs, tokenizer))
    return None if not masks else masks[0] if len(masks) == 1 else AllOf(masks)


class AllOf:
    """What every one of several masks allows."""

    def __init__(self, masks: list[TokenMask]) -> None:
        self._masks = masks

    def fill(self, words: np.ndarray) -> None:
        for mask in self._masks:
            mask.fill(words)

    def accept(self, token: int) -> None:
        for mask in self._masks:
            mask.accept(token)


class AllowedTokens:
    """Some tokens and no others."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = np.array(tokens)
        self._words: np.ndarray | None = None

    def fill(self, words: np.ndarray) -> None:
        if self._words is None:
            self._words = np.zeros_like(words)
            np.bitwise_or.at(self._words, self._tokens // 32, np.uint32(1) << (self._tokens % 32).astype(np.uint32))
        words &= self._words

    def accept(self, token: int) -> None:
        pass


class BadWords:
    """A token is not allowed where it would complete one of these sequences in the output."""

    def __init__(self, sequences: list[list[int]]) -> None:
        self._sequences = sequences
        self._longest = max(map(len, sequences)) - 1
        self._tail: list[int] = []  # of the output, as long as the longest beginning

    def fill(self, words: np.ndarray) -> None:
        for *beginning, last in self._sequences:
            if self._tail[len(self._tail) - len(beginning) :] == beginning and len(beginning) <= len(self._tail):
                words[last // 32] &= ~np.uint32(1 << last % 32)

    def accept(self, token: int) -> None:
        self._tail = [*self._tail, token][-self._longest :] if self._longest else []


def bad_sequences(texts: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token sequences of these texts, at the start of a text and after a space, by vLLM's rule."""
    sequences = []
    for text in texts:
        plain, spaced = (tokenizer.encode(space + text.lstrip(), add_special_tokens=False) for space in ("", " "))
        sequences.append(plain)
        if spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
    return [sequence for sequence in sequences if sequence]


class Grammar:
    """A JSON schema, a regular expression, a choice or a Lark grammar, through llguidance."""

    def __init__(self, what: StructuredOutputs, tokenizer: Tokenizer) -> None:
        if tokenizer.eos_token_id is None:
            raise InvalidArgument("structured_outputs", what, "the tokenizer names no end-of-sequence token, so nothing could end it")
        try:
            grammar = _grammar(what)
        except (TypeError, ValueError, RecursionError) as wrong:
            raise InvalidArgument("structured_outputs", what, f"must be valid JSON or text: {wrong}") from None
        self._matcher = llguidance.LLMatcher(_guide(tokenizer), grammar, log_level=0)
        if self._matcher.is_error():
            raise InvalidArgument("structured_outputs", what, f"llguidance cannot read it: {self._error()}")

    def fill(self, words: np.ndarray) -> None:
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():  # it allows the end-of-sequence then, as if all were well
            raise JengineError(f"structured_outputs: llguidance gave up: {self._error()}")
        count = min(len(words), len(allowed))
        words[:count] &= allowed[:count]
        words[count:] = 0

    def accept(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def _error(self) -> str:
        return str(self._matcher.get_error()).partition("\n<state>")[0]  # what follows are its insides


@functools.lru_cache(maxsize=4)
def _guide(tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    """llguidance's view of a tokenizer: a trie of the vocabulary, too dear to make for each request."""
    return llguidance.LLTokenizer(tokenizer.backend.to_str(), eos_token=tokenizer.eos_token_id)


def _grammar(what: StructuredOutputs) -> str:
    matcher = llguidance.LLMatcher
    if what.json is not None:
        schema = what.json if isinstance(what.json, str) else json.dumps(what.json)
        return str(matcher.grammar_from_json_schema(schema))
    if what.regex is not None:
        return str(matcher.grammar_from_regex(what.regex))
    if what.choice is not None:
        return str(matcher.grammar_from_lark("start: " + " | ".join(json.dumps(option) for option in what.choice)))
    assert what.grammar is not None
    return str(matcher.grammar_from_lark(what.grammar))
