"""Converts token ids to text as they arrive, in constant time per token, without splitting characters."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

MAX_HELD = 16  # maximum tokens that wait for the rest of a character; a character has at most 4 bytes


class Detokenizer(Protocol):
    """Incremental `decode(ids, skip_special_tokens=True)`: the deltas of all tokens and of `flush` join to
    the same text.

    After a prompt they join to the text that the ids add to the prompt's text.
    """

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; often empty. Does not depend on how tokens are grouped."""

    def flush(self) -> str:
        """Returns the remaining text, with an incomplete character as U+FFFD. Call once, last."""


class ByteLevelDetokenizer:
    """For byte-level BPE (GPT-2, Llama 3, Qwen): every token is bytes, and UTF-8 decodes incrementally.

    Exact for any ids: like the tokenizers library, it replaces each maximal ill-formed sequence by one
    U+FFFD, as the Unicode Standard recommends (section 3.9).
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For all other decoders, where a token's text may depend on its neighbours (such as SentencePiece).

    At each token, it decodes a window: the tokens of the last delta, as context, and those that wait. The
    delta is the window's text after the context's. This is the two-offset method of vLLM and TGI, with a
    bounded wait. Exact for well-formed text; byte tokens that form no character become one U+FFFD each.

    The first context is the end of the preceding tokens: at the start of a text, decoders drop a space.
    """

    def __init__(
        self, shows: Callable[[int], bool], decode: Callable[[list[int]], str], after: Sequence[int] = ()
    ) -> None:
        self._shows, self._decode = shows, decode
        self._context = [token for token in after[-MAX_HELD:] if shows(token)]
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._push, token_ids))

    def _push(self, token_id: int) -> str:
        if not self._shows(token_id):
            return ""
        self._held.append(token_id)
        delta = self._delta()
        if len(self._held) < MAX_HELD and (not delta or delta.endswith("\ufffd")):
            return ""
        self._context, self._held = self._held, []
        return delta

    def flush(self) -> str:
        return self._delta()

    def _delta(self) -> str:
        if not self._held:
            return ""
        context = self._decode(self._context)
        text = self._decode(self._context + self._held)
        # An incomplete character after the context affects the byte run that they share, so the context is
        # left out.
        return text.removeprefix(context) if text.startswith(context) else self._decode(self._held)


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a byte-level vocabulary writes as this token. Other tokens are taken literally."""
    try:
        return bytes(_byte_of_character()[c] for c in token)
    except KeyError:
        return token.encode()


def byte_level_characters(token: bytes) -> str:
    """The characters with which a byte-level vocabulary writes these bytes."""
    return "".join(_character_of_byte()[byte] for byte in token)


@cache
def _character_of_byte() -> dict[int, str]:
    return {byte: character for character, byte in _byte_of_character().items()}


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes map to themselves, others to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
