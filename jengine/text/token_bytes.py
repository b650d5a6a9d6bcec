"""Bounds the text of a token, so that a text that is too long can be rejected without tokenizing it."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

# maximum ratio of a text's bytes to those of its canonical composition; a test checks all of Unicode
NFC_SHRINKS = 3


def most_bytes_of_a_token(backend: tokenizers.Tokenizer) -> int | None:
    """Maximum bytes of text (UTF-8) for one token.

    None if some part of the tokenizer may drop or merge unlimited text: an unknown token, a normalizer that
    deletes text, whitespace that belongs to no token. Then the length of a text does not bound its number of
    tokens.
    """
    added = backend.get_added_tokens_decoder().values()
    shrinks = _shrinks(_state(backend.normalizer))
    if (
        shrinks is None
        or backend.truncation is not None
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    if not _keeps_all_text(_state(backend.pre_tokenizer)):
        return None
    model, vocabulary = backend.model, backend.get_vocab(with_added_tokens=False)
    byte_level = _has_byte_level(_state(backend.pre_tokenizer))
    if byte_level:
        every_byte = isinstance(model, models.BPE) and vocabulary.keys() >= set(
            pre_tokenizers.ByteLevel.alphabet()
        )
    else:
        every_byte = (
            isinstance(model, models.BPE)
            and model.byte_fallback
            and all(f"<0x{i:02X}>" in vocabulary for i in range(256))
        )
    if not every_byte:
        return None
    longest = max((len(token) if byte_level else len(token.encode()) for token in vocabulary), default=1)
    return shrinks * max([longest, *(len(token.content.encode()) for token in added)])


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer, as in tokenizer.json."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _shrinks(normalizer: dict[str, Any]) -> int | None:
    """Maximum ratio of text bytes to normalized bytes; None if unknown."""
    match normalizer.get("type"):
        case None | "Prepend" | "ByteLevel":
            return 1
        case "NFC":
            return NFC_SHRINKS
        case "Replace":
            text = normalizer["pattern"].get("String")
            return (
                1 if text is not None and len(text.encode()) <= len(normalizer["content"].encode()) else None
            )
        case "Sequence":
            product = 1
            for part in normalizer["normalizers"]:
                if (shrinks := _shrinks(part)) is None:
                    return None
                product *= shrinks
            return product
    return None


def _keeps_all_text(pre_tokenizer: dict[str, Any]) -> bool:
    match pre_tokenizer.get("type"):
        case None | "ByteLevel" | "Metaspace" | "Digits":
            return True
        case "Split" | "Punctuation":
            return bool(pre_tokenizer["behavior"] != "Removed")
        case "Sequence":
            return all(map(_keeps_all_text, pre_tokenizer["pretokenizers"]))
    return False


def _has_byte_level(pre_tokenizer: dict[str, Any]) -> bool:
    return pre_tokenizer.get("type") == "ByteLevel" or any(
        map(_has_byte_level, pre_tokenizer.get("pretokenizers", ()))
    )
