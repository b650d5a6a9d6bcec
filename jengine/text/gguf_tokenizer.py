"""Converts the tokenizer in a GGUF file's metadata, a vocabulary and the name of a rule, to a
`tokenizers.Tokenizer`. The rules' regular expressions are also those that are known to be fast.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jengine.base.errors import ModelError
from jengine.base.gguf_file import GgufFile, open_gguf

CONTROL, USER_DEFINED = 3, 4  # types of tokens
MAX_CHARACTERS = 2048  # of a token: merges are found among all its halves
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _ENDS
QWEN2 = _CONTRACTED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _ENDS


TEKKEN = "|".join(_CASED) + r"|\p{N}" + _SLASHED
GPT4O = "|".join(f"{cased}{_CONTRACTED}?" for cased in _CASED) + r"|\p{N}{1,3}" + _SLASHED
KNOWN = frozenset((LLAMA3, QWEN2, TEKKEN, GPT4O))
# texts begin with BOS, unless the file says otherwise; pieces that are in the vocabulary are not split
BEGINNING = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken")
SPLITS: dict[str, str] = {  # by tokenizer.ggml.pre: the rules that split text before merging
    **dict.fromkeys((*BEGINNING, "smaug-bpe", "dbrx"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), GPT4O),
    "tekken": TEKKEN,
}
GPT2 = ("gpt-2", "gpt2", "olmo", "phi-2", "jais", "mpt", "trillion")
# GPT-2's rule, but with single digits
DIGITS_FIRST = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")


def read_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Reads the tokenizer and its special tokens.

    Raises:
        ModelError: the file has none, or an unsupported one.
    """
    try:
        return _read(open_gguf(path))
    except ModelError:
        raise
    except Exception as wrong:  # the library raises bare Exception
        raise ModelError(f"the tokenizer is inconsistent: {wrong}", file=path) from None


def _read(file: GgufFile) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    kind = file["tokenizer.ggml.model"]
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"tokenizer.ggml.model={kind!r} is not supported; gpt2 and llama are", file=file.path
        )
    tokens: list[str] = file["tokenizer.ggml.tokens"]
    if (longest := max(map(len, tokens), default=0)) > MAX_CHARACTERS:
        raise ModelError(f"a token has {longest} characters; at most {MAX_CHARACTERS}", file=file.path)
    backend = _byte_level(file, tokens) if kind == "gpt2" else _sentence_piece(file, tokens)
    marked = zip(tokens, file.get("tokenizer.ggml.token_type", []), strict=False)
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in marked
        if kind in (CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)
    ids = {ours: file.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in SPECIAL_TOKENS.items()}
    special = {
        name: tokens[number]
        for name, number in ids.items()
        if number is not None and 0 <= number < len(tokens)
    }
    begins = file.get(
        "tokenizer.ggml.add_bos_token", kind == "llama" or file.get("tokenizer.ggml.pre") in BEGINNING
    )
    ends = file.get("tokenizer.ggml.add_eos_token", False)
    _surround(
        backend,
        special.get("bos_token") if begins else None,
        special.get("eos_token") if ends else None,
        kind == "gpt2",
    )
    return backend, special


def read_chat_templates(path: Path) -> dict[str, str]:
    """Templates by name: "default" and others."""
    file, key = open_gguf(path), "tokenizer.chat_template"
    named = {name: file[f"{key}.{name}"] for name in file.names(f"{key}.")}
    return {"default": file[key], **named} if key in file else named


def write_tokenizer(path: Path, folder: Path) -> None:
    """Writes the tokenizer, its special tokens and the chat templates in Hugging Face's layout, if the file
    has a tokenizer.
    """
    if "tokenizer.ggml.model" not in open_gguf(path):
        return
    backend, special = read_tokenizer(path)
    backend.save(str(folder / "tokenizer.json"))
    templates = [{"name": name, "template": template} for name, template in read_chat_templates(path).items()]
    config = {**special, **({"chat_template": templates} if templates else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre in GPT2:
        split: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in DIGITS_FIRST:
        split = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in SPLITS:
        cut = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
        split = pre_tokenizers.Sequence(
            [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        known = ", ".join(sorted({*GPT2, *DIGITS_FIRST, *SPLITS}))
        raise ModelError(f"tokenizer.ggml.pre={pre!r} is not supported; {known} are", file=file.path)
    merges = [merge.partition(" ")[::2] for merge in file["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=pre in BEGINNING)
    )
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(file: GgufFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Byte-pair encoding with U+2581 for spaces. Merges are ordered by the score of their result, the highest
    first.
    """
    vocabulary = _vocabulary(tokens)
    scores = dict(zip(tokens, file["tokenizer.ggml.scores"], strict=True))
    unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges(vocabulary, scores),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
        dropout=None,
    )
    backend = tokenizers.Tokenizer(model)
    spaced = file.get("tokenizer.ggml.add_space_prefix", True)
    replaced: list[Any] = [normalizers.Replace(" ", "\u2581")]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), *replaced] if spaced else replaced
    )
    stripped = [decoders.Strip(" ", 1, 0)] if spaced else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return backend


def _merges(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    merges = []
    for token, score in scores.items():
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        merges += [(-score, vocabulary[left], vocabulary[right], left, right) for left, right in known]
    return [(left, right) for *_, left, right in sorted(merges)]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _surround(backend: tokenizers.Tokenizer, first: str | None, last: str | None, byte_level: bool) -> None:
    """Adds these tokens before and after every text."""
    single = [token for token in (first, "$A", last) if token is not None]
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)] if byte_level else []
    if len(single) > 1:
        special = [
            (token, backend.token_to_id(token)) for token in dict.fromkeys((first, last)) if token is not None
        ]
        steps.append(
            processors.TemplateProcessing(single=single, pair=[*single, "$B:1"], special_tokens=special)
        )
    if steps:
        backend.post_processor = processors.Sequence(steps)


def unknown_patterns(backend: tokenizers.Tokenizer) -> list[str]:
    """Regular expressions by which text is split or changed before it becomes tokens, other than KNOWN.

    The tokenizers library matches them by backtracking, which may take very long.
    """
    patterns: list[str] = []
    inside: list[Any] = [
        json.loads(part.__getstate__())
        for part in (backend.normalizer, backend.pre_tokenizer)
        if part is not None
    ]
    while inside:
        value = inside.pop()
        if isinstance(value, dict):
            if isinstance(pattern := value.get("Regex"), str):
                patterns.append(pattern)
            inside += value.values()
        elif isinstance(value, list):
            inside += value
    return [pattern for pattern in patterns if pattern not in KNOWN]
