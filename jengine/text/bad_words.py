"""Token sequences that must not occur in an output."""

from __future__ import annotations

from collections.abc import Iterable

from jengine.base.errors import InvalidArgument
from jengine.text.tokenizer import Tokenizer


def bad_sequences(texts: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token sequences of these texts, with and without a leading space, following vLLM's rule.

    Raises:
        InvalidArgument: a text has no tokens.
    """
    sequences = []
    for text in texts:
        plain, spaced = (
            tokenizer.encode(space + text.lstrip(), add_special_tokens=False) for space in ("", " ")
        )
        if not plain:
            raise InvalidArgument("bad_words", text, "each must have a token that is not white space")
        sequences.append(plain)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
    return sequences
