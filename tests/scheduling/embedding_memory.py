"""Simulated pool of embeddings: what each of its rows holds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jengine.core.images import CONTENT, ImagePart, PromptImages
from jengine.scheduling.pages.block_table import outside
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.step_plan import Encoding

FIRST = 1000  # id of the pool's first row; above all tokens


def with_images(prompt: list[int], images: Iterable[tuple[int, int, int]]) -> tuple[list[int], PromptImages]:
    """A prompt with images before its last token: its ids, and the images.

    Args:
        images: for each one, the number of tokens after the last one, what it shows, and its rows.
    """
    ids, parts, positions, at = [*prompt], list[ImagePart](), list[int](), 0
    for gap, content, rows in images:
        at = min(at + gap, len(ids) - 1)
        key, patches = 1000 * content + 10 * rows, np.zeros((rows, 1))
        parts.append(ImagePart(key, patches.astype(np.float32), patches.astype(np.int32), rows, (1, rows)))
        ids[at:at] = [0] * rows
        positions += range(at, at + rows)
        at += rows
    return ids, PromptImages(tuple(parts), positions)


class EmbeddingMemory:
    """Encodes parts as given, and rejects prompts that read anything else than their own embeddings."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}  # ids of content, see PromptImages

    def encode(self, encoding: Encoding | None) -> None:
        for part, rows in () if encoding is None else encoding.parts:
            self._rows |= {row: CONTENT + part.key + index for index, row in enumerate(rows)}

    def read(self, sequence: Sequence, start: int, ids: list[int]) -> list[int]:
        """The tokens of a sequence from `start` on, of the ids that programs read."""
        for border in (start, start + len(ids)):
            assert outside(sequence.whole, border) == border, "a part whose tokens see each other is split"
        if sequence.images is None:
            return ids
        content, tokens = dict(zip(sequence.images.positions, sequence.images.content, strict=True)), [*ids]
        for at, token in enumerate(ids, start):
            assert (at in content) == (token >= FIRST), "an embedding is missing"
            if at in content:
                assert self._rows.get(token - FIRST) == content[at], "another's embedding"
                tokens[at - start] = sequence.tokens[at]
        return tokens
