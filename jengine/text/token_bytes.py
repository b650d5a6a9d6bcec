"""How much text a token may stand for: a long text that cannot fit is rejected by its length, without tokenizing it."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

NFC_SHRINKS = 3  # bytes of text to bytes of its canonical composition, at most; tests go through all of Unicode


def most_bytes_of_a_token(backend: tokenizers.Tokenizer) -> int | None:
    """Bytes of text (UTF-8) that one token stands for at most.

    None where some part of the tokenizer may drop text or merge any amount of it: an unknown token, a normalizer that deletes,
    white space that belongs to no token. Then a text's length says nothing about its number of tokens.
    """
    added = backend.get_added_tokens_decoder().values()
    shrinks = _shrinks(_state(backend.normalizer))
    if shrinks is None or backend.truncation is not None or any(token.lstrip or token.rstrip for token in added):
        return None
    if not _keeps_all_text(_state(backend.pre_tokenizer)):
        return None
    model, vocabulary = backend.model, backend.get_vocab(with_added_tokens=False)
    byte_level = _has_byte_level(_state(backend.pre_tokenizer))
    if byte_level:
        every_byte = isinstance(model, models.BPE) and vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    else:
        every_byte = isinstance(model, models.BPE) and model.byte_fallback and all(f"<0x{i:02X}>" in vocabulary for i in range(256))
    if not every_byte:
        return None
    longest = max((len(token) if byte_level else len(token.encode()) for token in vocabulary), default=1)
    return shrinks * max([longest, *(len(token.content.encode()) for token in added)])


def _state(part: Any) -> dict[str, Any]:
    """A tokenizer's part as tokenizer.json describes it."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _shrinks(normalizer: dict[str, Any]) -> int | None:
    """Bytes of text to a byte of normalized text, at most; None where that is not known."""
    match normalizer.get("type"):
        case None | "Prepend" | "ByteLevel":
            return 1
        case "NFC":
            return NFC_SHRINKS
        case "Replace":
            text = normalizer["pattern"].get("String")
            return 1 if text is not None and len(text.encode()) <= len(normalizer["content"].encode()) else None
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
    return pre_tokenizer.get("type") == "ByteLevel" or any(map(_has_byte_level, pre_tokenizer.get("pretokenizers", ())))
