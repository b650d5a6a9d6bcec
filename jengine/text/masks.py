"""Token masks: constraints that depend on previous tokens, computed on the host while the device works."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from jengine.base.errors import JengineError
from jengine.core.request import SamplingParams, TokenMask
from jengine.core.structured_outputs import StructuredOutputs
from jengine.table.program_table import MOST_DRAFTS
from jengine.text.grammars import compile_structure, end_ids, error_of
from jengine.text.tokenizer import Tokenizer, bad_sequences


class Mask(TokenMask, Protocol):
    """A mask that can be copied before it has accepted a token."""

    def copy(self) -> Mask: ...


def make_masks(params: SamplingParams, tokenizer: Tokenizer, count: int) -> Sequence[TokenMask | None]:
    """Creates masks for a prompt's samples, or the same number of None. Shared parts are created once.

    Raises:
        InvalidArgument: a grammar is invalid or exceeds a limit.
    """
    mask = make_mask(params, tokenizer)
    return [None] * count if mask is None else [mask, *(mask.copy() for _ in range(count - 1))]


def make_mask(params: SamplingParams, tokenizer: Tokenizer) -> Mask | None:
    """Creates the mask that a request needs, or returns None. Raises as make_masks."""
    masks: list[Mask] = []
    if params.allowed_token_ids is not None:
        masks.append(AllowedTokens(params.allowed_token_ids))
    if params.bad_words:
        masks.append(BadWords(bad_sequences(params.bad_words, tokenizer)))
    if isinstance(params.structured_outputs, StructuredOutputs):
        masks.append(Grammar(params.structured_outputs, tokenizer))
    if params.many_stops:
        masks.append(AllOf([]))  # the engine adds what min_tokens suppresses to any mask
    return None if not masks else masks[0] if len(masks) == 1 else AllOf(masks)


class AllOf(TokenMask):
    """The intersection of several masks."""

    def __init__(self, masks: Sequence[TokenMask]) -> None:
        self._masks = masks

    def copy(self) -> AllOf:
        return AllOf([mask.copy() for mask in self._masks])  # type: ignore[attr-defined]  # they are Masks

    def fill(self, words: np.ndarray) -> None:
        for mask in self._masks:
            mask.fill(words)

    def accept(self, token: int) -> None:
        for mask in self._masks:
            mask.accept(token)

    def rollback(self, count: int) -> None:
        for mask in self._masks:
            mask.rollback(count)

    def forced(self) -> list[int]:
        return next((tokens for mask in self._masks if (tokens := mask.forced())), [])

    def free(self) -> int:
        return min([mask.free() for mask in self._masks], default=0)

    def is_complete(self) -> bool:
        return any(mask.is_complete() for mask in self._masks)


class AllowedTokens(TokenMask):
    """Allows only these tokens."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = np.array(tokens)
        self._words: np.ndarray | None = None

    def copy(self) -> AllowedTokens:
        return self  # it has no state

    def fill(self, words: np.ndarray) -> None:
        if self._words is None:
            self._words = words_of(self._tokens, len(words))
        words &= self._words

    def accept(self, token: int) -> None:
        pass

    def rollback(self, count: int) -> None:
        pass


def words_of(tokens: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """A mask of `count` words that allows only these tokens."""
    words, ids = np.zeros(count, np.uint32), np.asarray(tokens, np.int64)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words


class GivenTokens(TokenMask):
    """Allows a single token at each position: those of a known output."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._taken = tokens, 0

    def fill(self, words: np.ndarray) -> None:
        if self._taken < len(self._tokens):  # behind the end, rows do not count
            token = self._tokens[self._taken]
            bits = words[token // 32] & np.uint32(1 << token % 32)
            words[:] = 0
            words[token // 32] = bits

    def accept(self, token: int) -> None:
        self._taken += 1

    def rollback(self, count: int) -> None:
        self._taken -= count

    def forced(self) -> list[int]:
        return [*self._tokens[self._taken :]]


class BadWords(TokenMask):
    """Forbids tokens that would complete one of these sequences in the output."""

    def __init__(self, sequences: list[list[int]]) -> None:
        self._sequences = sequences
        self._longest = max(map(len, sequences)) - 1
        # end of the output, as long as the longest prefix of a sequence and the tokens that may be taken back
        self._tail: list[int] = []

    def copy(self) -> BadWords:
        return copy.copy(self)  # the tail is replaced, never modified

    def fill(self, words: np.ndarray) -> None:
        for *beginning, last in self._sequences:
            if self._tail[len(self._tail) - len(beginning) :] == beginning and len(beginning) <= len(
                self._tail
            ):
                words[last // 32] &= ~np.uint32(1 << last % 32)

    def accept(self, token: int) -> None:
        self._tail = [*self._tail, token][-self._longest - MOST_DRAFTS :]

    def rollback(self, count: int) -> None:
        self._tail = self._tail[: len(self._tail) - count]


class Grammar(TokenMask):
    """A JSON schema, a regular expression, a choice or a Lark grammar, through llguidance.

    Everything that may be slow is in `fill`, which may be called in another thread and abandoned there. While
    an abandoned call still runs, copies of the grammar fail.
    """

    def __init__(self, what: StructuredOutputs, tokenizer: Tokenizer) -> None:
        self._matcher, self._end_ids = compile_structure(what, tokenizer), end_ids(tokenizer)
        self._complete = False  # whether the output may end, at the last `fill`
        self._unread: list[int] = []  # tokens that the matcher has not consumed yet
        self._ended = 0  # tokens that it has not consumed since it has stopped
        self._drafts = False  # whether anyone asks for forced tokens
        # the only way on from some state, as far as there is only one, and the tokens accepted since then
        self._way: list[int] = []
        self._since: list[int] = []
        self._busy = threading.Lock()  # shared by copies, as their matchers share a lexer

    def copy(self) -> Grammar:
        other = copy.copy(self)
        other._matcher, other._unread = self._matcher.deep_copy(), list(self._unread)
        other._since = list(self._since)
        return other

    def fill(self, words: np.ndarray) -> None:
        if not self._busy.acquire(blocking=False):
            raise JengineError("structured_outputs: the mask of another sample took too long")
        try:
            self._consume()
            allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            self._complete = self._matcher.is_accepting()
            if self._drafts and not self.forced():
                self._way, self._since = self._matcher.compute_ff_tokens(), []
        finally:
            self._busy.release()
        # otherwise llguidance would allow the end-of-sequence token, as if nothing were wrong
        if self._matcher.is_error():
            raise JengineError(f"structured_outputs: llguidance failed: {error_of(self._matcher)}")
        # llguidance also allows an end as text, if it is no special token: in the middle of a string
        ends = words_of(self._end_ids, len(allowed))
        allowed = allowed | ends if self._complete else allowed & ~ends
        count = min(len(words), len(allowed))
        words[:count] &= allowed[:count]
        words[count:] = 0

    def is_complete(self) -> bool:
        return self._complete

    def accept(self, token: int) -> None:
        self._unread.append(token)
        self._since.append(token)

    def forced(self) -> list[int]:
        self._drafts, past = True, len(self._since)
        return self._way[past:] if self._way[:past] == self._since else []

    def rollback(self, count: int) -> None:
        if count > len(self._since):
            self._way = []
        del self._since[max(len(self._since) - count, 0) :]
        unread = min(count, len(self._unread))
        del self._unread[len(self._unread) - unread :]
        ended = min(count - unread, self._ended)
        self._ended -= ended
        if consumed := count - unread - ended:
            self._matcher.rollback(consumed)

    def _consume(self) -> None:
        for token in self._unread:
            if self._matcher.is_stopped():
                self._ended += 1
            else:
                self._matcher.consume_token(token)
        self._unread.clear()
