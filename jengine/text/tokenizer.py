"""Text to token ids and back, from a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from jengine.errors import InvalidArgument, ModelError
from jengine.text.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer, byte_level_bytes


class Tokenizer:
    """A model's tokenizer: a `tokenizers.Tokenizer` and the folder's special tokens.

    `eos_token_id` is None where the folder names no end-of-sequence token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token: str | None = None) -> None:
        self.backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id: int | None = None if eos_token is None else backend.token_to_id(eos_token)
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._bytes: dict[int, bytes] = {}  # filled as tokens come: a run sees few of a large vocabulary

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer of a model's folder.

        Reads tokenizer.json with the tokenizers library: importing transformers costs two seconds, so only a
        folder without that file goes through it, to be converted.

        Raises:
            ModelError: no tokenizer there, or one that cannot be read.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            return cls(*_convert(path))
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as wrong:  # the library raises bare Exception
            raise ModelError(f"not a tokenizer: {wrong}", file=file) from None
        # tokenizer.json may carry the limits of its training; a prompt's length is the engine's to judge.
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, _eos_token(path))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with the special tokens around a text, such as a leading <s>, that the tokenizer prescribes.

        Raises:
            InvalidArgument: text with lone surrogates, which is no Unicode text.
        """
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError):
            raise InvalidArgument("prompt", text, "must be text that UTF-8 can encode") from None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text; ids outside the vocabulary have none, bytes that are no UTF-8 become U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token's text, special tokens included: what `Logprob.decoded_token` shows."""
        return self.decode([token_id], skip_special_tokens=False)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental detokeniser, for one output."""
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        if isinstance(self.backend.decoder, tokenizers.decoders.ByteLevel):
            return ByteLevelDetokenizer(lambda token: b"" if token in hidden else self._bytes_of(token))

        def shows(token: int) -> bool:
            return token not in hidden and self.backend.id_to_token(token) is not None

        return WindowDetokenizer(shows, lambda ids: self.decode(ids, skip_special_tokens=False))

    def _bytes_of(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            token = self.backend.id_to_token(token_id)
            known = b"" if token is None else token.encode() if token_id in self.special_ids else byte_level_bytes(token)
            self._bytes[token_id] = known
        return known


def _eos_token(path: Path) -> str | None:
    """From tokenizer_config.json, else special_tokens_map.json: a string, or an added token's description."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = path / name
        if not file.is_file():
            continue
        try:
            token = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
        except (ValueError, AttributeError) as wrong:
            raise ModelError(f"not a JSON object: {wrong}", file=file) from None
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def _convert(path: Path) -> tuple[tokenizers.Tokenizer, str | None]:
    """Through transformers, which builds a fast tokenizer from older files (tokenizer.model, vocab.json)."""
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(path, use_fast=True)
        return slow.backend_tokenizer, slow.eos_token
    except Exception as wrong:  # whatever the format's own reader raises
        reason = f"no tokenizer.json, and transformers makes no fast tokenizer of the other files: {wrong}"
        raise ModelError(reason, file=path) from wrong
