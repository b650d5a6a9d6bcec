"""The regular expressions of a tokenizer."""

from __future__ import annotations

import json
from typing import Any

import tokenizers

from jengine.text.gguf_tokenizer import GPT4O, LLAMA3, QWEN2, TEKKEN

KNOWN = frozenset((LLAMA3, QWEN2, TEKKEN, GPT4O))


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
