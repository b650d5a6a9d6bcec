"""Text to token ids and back, from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import models, pre_tokenizers

from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.gguf_file import is_gguf
from jengine.base.model_files import check_regular, malformed, read_bytes, read_object
from jengine.text.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer, byte_level_bytes
from jengine.text.tekken import read_tekken

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from jengine.text.chat_template import ChatTemplate
    from jengine.vision.reader import ImageReader


FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer_config.json",
    "tekken.json",
)
MAX_ID = 1 << 32
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of SentencePiece for a byte
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


# maximum ratio of a text's bytes to those of its canonical composition; a test checks all of Unicode
NFC_SHRINKS = 3


class Tokenizer:
    """A model's tokenizer: a `tokenizers.Tokenizer`, and the folder's special tokens.

    `special_tokens` maps names such as "eos_token" to the tokens that the folder defines.
    `eos_token_id` is None if it defines no end-of-sequence token. `waits`: whether `encode` waits for another
    process. The engine sets two attributes when it has started: `images`, which reads the images of prompts,
    and `model_eos_token_ids`, all end-of-sequence tokens of the model.
    """

    images: ImageReader | None = None
    model_eos_token_ids: tuple[int, ...] = ()
    waits = False

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.backend, self.special_tokens, self.folder = backend, special_tokens or {}, folder
        eos_token = self.special_tokens.get("eos_token")
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id: int | None = None if eos_token is None else backend.token_to_id(eos_token)
        self.special_ids = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}  # filled on demand: a run uses few tokens of a large vocabulary

    @classmethod
    def load(cls, path: Path, chat_template: str | Path | None = None) -> Tokenizer:
        """Loads the tokenizer of a model's folder, or of a GGUF file.

        Args:
            path: the folder or file.
            chat_template: replaces the folder's chat templates: a file, or the template itself.

        Raises:
            ModelError: there is no tokenizer, or it or the template cannot be read.
            InvalidArgument: chat_template is neither a file nor a template.
        """
        file, tekken = path / "tokenizer.json", path / "tekken.json"
        if is_gguf(path):
            from jengine.text.gguf_tokenizer import read_tokenizer

            tokenizer = cls(*read_tokenizer(path), path)
        elif file.is_file():
            tokenizer = cls(_read_json(file, path), special_tokens_of(path), path)
        else:  # other formats are converted with transformers, since importing it takes two seconds
            tokenizer = cls(*(read_tekken(tekken) if tekken.is_file() else _convert(path)), path)
        if chat_template is not None:
            from jengine.text.chat_template import given_template  # only chats need jinja2

            tokenizer.chat_templates = {"default": given_template(chat_template, tokenizer.special_tokens)}
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the tokenizer prescribes around a text, such as a leading
        <s>.

        Other threads can run meanwhile: unlike the library's `encode`, `encode_batch_fast` releases the
        interpreter's lock.

        Raises:
            InvalidArgument: the text has lone surrogates, which are not valid Unicode.
        """
        try:
            return list(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        except (TypeError, UnicodeEncodeError):
            raise InvalidArgument("prompt", text, "must be text that UTF-8 can encode") from None
        except BaseException as wrong:
            if type(wrong).__name__ != "PanicException":  # of Rust: it is no Exception
                raise
            limit = f"the model's tokenizer fails on this text: {wrong}"
            raise InvalidArgument("prompt", text, limit) from None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decodes ids to text. Ids outside the vocabulary have no text; bytes that are not UTF-8 become
        U+FFFD.
        """
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def decode_unlocked(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Like `decode`, for many ids: other threads can run meanwhile."""
        return str(self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Maximum bytes of text (UTF-8) for one token; None if there is no maximum."""
        return most_bytes_of_a_token(self.backend)

    def token_text(self, token_id: int) -> str:
        """Text of one token, special tokens included, as in `Logprob.decoded_token`."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, special tokens included: joined, those of an output are its text in UTF-8, also
        where a token is a part of a character.
        """
        if isinstance(self.backend.decoder, tokenizers.decoders.ByteLevel):
            return self._bytes_of(token_id)
        token, text = self.backend.id_to_token(token_id), self.token_text(token_id)
        if token is None or token_id in self.special_ids:
            return text.encode()
        if text != token and (byte := _BYTE.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        # at the beginning of a text, decoders drop a space
        return self.decode([token_id, token_id], skip_special_tokens=False).removeprefix(text).encode()

    def detokenizer(self, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> Detokenizer:
        """A new incremental detokenizer for one output. `after`: the prompt's ids, which decide whether a
        leading space is kept."""
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        if isinstance(self.backend.decoder, tokenizers.decoders.ByteLevel):
            return ByteLevelDetokenizer(lambda token: b"" if token in hidden else self._bytes_of(token))

        def shows(token: int) -> bool:
            return token not in hidden and self.backend.id_to_token(token) is not None

        return WindowDetokenizer(shows, lambda ids: self.decode(ids, skip_special_tokens=False), after)

    @cached_property
    def chat_templates(self) -> dict[str, ChatTemplate]:
        """The folder's chat templates by name ("default", perhaps "tool_use"), read on first use; may be
        empty.

        Raises:
            ModelError: one cannot be read.
        """
        from jengine.text.chat_template import load_chat_templates  # only chats need jinja2

        return {} if self.folder is None else load_chat_templates(self.folder, self.special_tokens)

    def for_transformers(self, name: str, max_length: int) -> PreTrainedTokenizerFast:
        """A copy of this tokenizer as a class of transformers, with the folder's chat templates.

        Nothing else is read: no code of the folder runs. The first call takes seconds: it imports
        transformers.
        """
        from transformers import PreTrainedTokenizerFast

        templates = {key: template.source for key, template in self.chat_templates.items()}
        return PreTrainedTokenizerFast(
            tokenizer_object=self.backend,
            name_or_path=name,
            model_max_length=max_length,
            clean_up_tokenization_spaces=False,
            chat_template=templates.get("default") if len(templates) < 2 else templates,
            **self.special_tokens,
        )

    def _bytes_of(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            token = self.backend.id_to_token(token_id)
            known = (
                b""
                if token is None
                else token.encode()
                if token_id in self.special_ids
                else byte_level_bytes(token)
            )
            self._bytes[token_id] = known
        return known


def bad_sequences(texts: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token sequences of texts that must not occur in an output, with and without a leading space, following
    vLLM's rule.

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


def has_tokenizer(path: Path) -> bool:
    """Whether a folder has any tokenizer file; GGUF files have one."""
    return is_gguf(path) or any((path / name).is_file() for name in FILES)


def _read_json(file: Path, folder: Path) -> tokenizers.Tokenizer:
    data = read_bytes(file)
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except Exception as wrong:  # the library raises bare Exception
        raise ModelError(f"not a tokenizer: {wrong}", file=file) from None
    # tokenizer.json may contain limits from training; the engine checks prompt lengths itself.
    backend.no_truncation()
    backend.no_padding()
    _add_tokens(backend, folder)
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Adds tokens that tokenizer.json does not list as added, as transformers does: those of
    added_tokens_decoder in tokenizer_config.json or, in older folders, of added_tokens.json, whose ids must
    continue the vocabulary; then those of the vocabulary that other fields name as special.

    Raises:
        ModelError: a token's id is taken, or leaves a gap.
    """
    file, older = path / "tokenizer_config.json", path / "added_tokens.json"
    fields, older_fields = _special_fields(path)
    named = [*special_tokens_of(path).values(), *_further_special_tokens(fields)]
    if "added_tokens_decoder" not in fields:
        named += _further_special_tokens(older_fields)
    if fields.get("added_tokens_decoder"):
        with malformed(file):
            listed = [
                (int(number), tokenizers.AddedToken(**_token_fields(token)))
                for number, token in fields["added_tokens_decoder"].items()
            ]
        _add_listed(backend, sorted(listed, key=itemgetter(0)), file)
    elif older.is_file():
        with malformed(older):
            listed = [
                (int(number), tokenizers.AddedToken(token, special=special, normalized=not special))
                for token, number in read_object(older).items()
                for special in [token in named]
            ]
        _add_listed(backend, sorted(listed, key=itemgetter(0)), older)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in dict.fromkeys(named):
        if token not in known and backend.token_to_id(token) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False)])


def _further_special_tokens(fields: Mapping[str, Any]) -> Iterator[str]:
    """Texts of special tokens without a role, under the field's newer or older name."""
    for name in ("extra_special_tokens", "additional_special_tokens"):
        listed = fields.get(name)
        every = listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ()
        for token in every:
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                yield text


def _add_listed(
    backend: tokenizers.Tokenizer, tokens: Iterable[tuple[int, tokenizers.AddedToken]], file: Path
) -> None:
    added = backend.get_added_tokens_decoder()
    for number, token in tokens:
        if not 0 <= number < MAX_ID:
            reason = f"has {token.content!r} at id {number}: must be from 0 to {MAX_ID - 1}"
            raise ModelError(reason, file=file)
        known = backend.id_to_token(number)
        continues = known is None and number == backend.get_vocab_size(with_added_tokens=True)
        if continues or (known == token.content and number not in added):
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
            known = backend.id_to_token(number)
        if known != token.content:
            there = "ids end before it" if known is None else f"it is {known!r}"
            raise ModelError(
                f"has {token.content!r} at id {number}, but in tokenizer.json {there}", file=file
            )


def _token_fields(token: dict[str, Any]) -> dict[str, Any]:
    names = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
    return {"content": token["content"], **{name: token[name] for name in names if name in token}}


def special_tokens_of(path: Path) -> dict[str, str]:
    """By role. Files have strings, or descriptions of added tokens. As in transformers,
    special_tokens_map.json decides if tokenizer_config.json has no added_tokens_decoder.
    """
    tokens: dict[str, str] = {}
    files = _special_fields(path)
    for fields in files if "added_tokens_decoder" in files[0] else reversed(files):
        for kind, token in ((kind, fields.get(kind)) for kind in SPECIAL_TOKENS):
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                tokens.setdefault(kind, text)
    return tokens


def _special_fields(path: Path) -> list[dict[str, Any]]:
    """The fields of tokenizer_config.json and of special_tokens_map.json."""
    files = path / "tokenizer_config.json", path / "special_tokens_map.json"
    return [read_object(file) if file.is_file() else {} for file in files]


def _convert(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Converts with transformers, which builds a fast tokenizer from older files (tokenizer.model,
    vocab.json).
    """
    from transformers import AutoTokenizer

    check_regular(path)
    try:
        slow = AutoTokenizer.from_pretrained(path, use_fast=True)
        return slow.backend_tokenizer, slow.special_tokens_map
    except Exception as wrong:  # the readers of formats raise various errors
        reason = (
            f"no tokenizer.json, and transformers cannot build a fast tokenizer from the other files: {wrong}"
        )
        raise ModelError(reason, file=path) from wrong


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
