"""What the folder of a LoRA adapter says about text: its chat templates and its tokens."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine.base.errors import ModelError
from jengine.base.model_files import read_json
from jengine.hub.download import download
from jengine.text.tokenizer import Tokenizer, special_tokens_of

if TYPE_CHECKING:
    from jengine.text.chat_template import ChatTemplate

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
ADDED_TOKENS: dict[str, Callable[[Any], list[tuple[Any, Any]]]] = {  # by file: how they are listed
    "tokenizer.json": lambda file: [
        (token["content"], token["id"]) for token in file.get("added_tokens") or ()
    ],
    "tokenizer_config.json": lambda file: [
        (token["content"], number) for number, token in (file.get("added_tokens_decoder") or {}).items()
    ],
    "added_tokens.json": lambda file: [*file.items()],
}
FILES = ("adapter_model.safetensors", "*.json", "*.jinja")  # of an adapter: tensors, configuration, tokenizer


def find_lora(path: str) -> Path:
    """The absolute folder of an adapter: a folder, or a hub id, whose files are downloaded unless they are
    cached.

    Raises:
        ModelError: there is no such folder, or it cannot be downloaded.
    """
    try:
        folder = Path(path).expanduser()
        if path and folder.is_dir():
            return folder.resolve()
    except (OSError, ValueError, RuntimeError) as wrong:  # a NUL, an unknown user, links in a circle
        raise ModelError(f"cannot be read: {wrong}", file=path) from None
    if HUB_ID.fullmatch(path) is None:
        raise ModelError("there is no such folder; a hub id has the form owner/name", file=path)
    return download(path, None, FILES, "*/*").resolve()


def lora_tokenizer(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """The tokenizer for conversations with an adapter: the model's, with the adapter's chat templates if its
    folder has others than the model's. These may use its special tokens.

    Raises:
        ModelError: a file cannot be read, or the adapter has tokens that the model's tokenizer lacks.
    """
    from jengine.text.chat_template import load_chat_templates  # imported here, since only chats need jinja2

    for token, number, file in _added_tokens(folder):
        known = tokenizer.backend.token_to_id(token)
        if known != number:
            there = "the model's tokenizer lacks it" if known is None else f"it is {known} for the model"
            raise ModelError(f"has the added token {token!r} with id {number}, but {there}", file=file)
    templates = load_chat_templates(folder, {**tokenizer.special_tokens, **special_tokens_of(folder)})
    plain = Tokenizer(tokenizer.backend, tokenizer.special_tokens, tokenizer.folder)  # without chat_template
    if not templates or _meanings(templates) == _meanings(plain.chat_templates):
        return tokenizer
    copied = copy.copy(tokenizer)
    copied.chat_templates = templates
    return copied


def _meanings(templates: Mapping[str, ChatTemplate]) -> dict[str, tuple[str, dict[str, str]]]:
    """All that the templates' results depend on: sources, and the special tokens that these mention."""
    return {
        name: (
            template.source,
            {kind: token for kind, token in template.special_tokens.items() if kind in template.names},
        )
        for name, template in templates.items()
    }


def _added_tokens(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Tokens beyond the vocabulary, their ids, and the file that has each."""
    for name, listed in ADDED_TOKENS.items():
        file = folder / name
        if not file.is_file():
            continue
        try:
            pairs = [(str(text), int(number)) for text, number in listed(read_json(file))]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as wrong:
            raise ModelError(f"its added tokens cannot be read: {wrong!r}", file=file) from None
        yield from ((text, number, file) for text, number in pairs)
