"""Mistral's tokenizer format, tekken.json: tokens of a byte-level BPE by rank, after special tokens."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from jengine.base.errors import ModelError
from jengine.base.model_files import read_object
from jengine.text.detokenizer import byte_level_characters

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
MAX_BYTES = 2048  # of a token: merges are found among all its halves
MAX_SPECIAL = 1 << 16
# The first special tokens, for files that do not list them.
UNLISTED = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def read_tekken(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Reads the tokenizer, which starts texts with <s>, and its special tokens by role.

    Raises:
        ModelError: the file is not a valid tekken.json.
    """
    content = read_object(file)
    try:
        special, config = _special_tokens(content), content["config"]
        size = int(config.get("default_vocab_size") or len(special) + len(content["vocab"])) - len(special)
        ranked = [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"][:size]]
        if (longest := max(map(len, ranked), default=0)) > MAX_BYTES:
            raise ValueError(f"a token has {longest} bytes; at most {MAX_BYTES}")
        backend = _backend(ranked, special, config["pattern"])
    except Exception as wrong:  # the library raises bare Exception for a wrong pattern
        raise ModelError(f"is not a tokenizer in Mistral's tekken format: {wrong!r}", file=file) from None
    names = {token.content for token in special}
    return backend, {role: token for role, token in SPECIAL_TOKENS.items() if token in names}


def generated_template(file: Path) -> str | None:
    """The chat template that mistral-common generates for a tekken.json; None if it is not installed.

    Raises:
        ModelError: mistral-common rejects the file.
    """
    try:
        from mistral_common.integrations.chat_templates.chat_templates import (
            convert_tokenizer_to_chat_template,
        )
    except ImportError:
        return None
    try:
        return str(convert_tokenizer_to_chat_template(file))
    except Exception as wrong:  # the library's errors have no common base class
        raise ModelError(
            f"mistral-common cannot create a chat template from it: {wrong}", file=file
        ) from None


def _special_tokens(content: dict[str, Any]) -> list[AddedToken]:
    """Special tokens by id, from 0 on. Unused ids get placeholders."""
    listed = content.get("special_tokens")
    if listed is None:
        listed = [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(UNLISTED)
        ]
    listed = sorted(listed, key=lambda entry: entry["rank"])
    if [entry["rank"] for entry in listed] != list(range(len(listed))):
        raise ValueError("the ranks of special_tokens have gaps")
    special = int(content["config"].get("default_num_special_tokens") or len(listed))
    if special > MAX_SPECIAL:
        raise ValueError(f"default_num_special_tokens={special} must be at most {MAX_SPECIAL}")
    fillers = range(len(listed), special)
    tokens = [(entry["token_str"], entry.get("is_control", True)) for entry in listed] + [
        (f"<SPECIAL_{i}>", True) for i in fillers
    ]
    return [AddedToken(token, special=control, normalized=False) for token, control in tokens]


def _backend(ranked: list[bytes], special: list[AddedToken], pattern: str) -> tokenizers.Tokenizer:
    ranks = {token: rank for rank, token in enumerate(ranked)}
    vocab = {token.content: number for number, token in enumerate(special)}
    vocab |= {byte_level_characters(token): len(special) + rank for token, rank in ranks.items()}
    merges = [
        (byte_level_characters(left), byte_level_characters(right))
        for token in ranked
        for left, right in _splits(token, ranks)
    ]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, fuse_unk=False, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for token in special if token.special])
    backend.add_tokens([token for token in special if not token.special])
    bos = SPECIAL_TOKENS["bos_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
    )
    return backend


def _splits(token: bytes, ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pairs of tokens that merge to this token, the lowest ranks first, since they exist first."""
    pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
    known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
    return iter(sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])))
