"""Images of a prompt, as the engine takes them: cut into patches, with their places in the prompt."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

VISUAL = -1  # in place of a token id: the next embedding row of an image
KEY_BITS = 61  # of the hash of a part's content
CONTENT = 1 << 62  # at least this in ids that stand for content; above all token ids


def key_of(content: bytes) -> int:
    """A hash of content, KEY_BITS."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> (64 - KEY_BITS)


def prompt_key(ids: list[int]) -> int:
    """An id that stands for a prompt whose tokens see each other, as a key of cached pages."""
    return CONTENT + key_of(array("q", ids).tobytes())


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image, or a part of one that the encoder reads by itself; or embeddings that a prompt gives.

    Attributes:
        key: of its content, KEY_BITS; parts with equal keys have equal embeddings.
        pixels: float32 [patches, features].
        places: int32 [patches, P], see `vision.family.Patches`.
        rows: embeddings that the encoder makes of it.
        grid: height and width of these rows in the image.
    """

    key: int
    pixels: np.ndarray
    places: np.ndarray
    rows: int
    grid: tuple[int, int]


@dataclass(frozen=True, slots=True)
class CutImage:
    """An image that has been read and cut as its model needs it, in the order of its embeddings."""

    parts: tuple[ImagePart, ...]


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt. Its token ids have an ordinary id at each embedding.

    Attributes:
        parts: in the order of their embeddings.
        positions: of all embeddings in the prompt, ascending.
        ends: for each part, the number of embeddings up to its end.
        content: for each embedding, an id that stands for its content, as a key of cached pages.
    """

    parts: tuple[ImagePart, ...]
    positions: list[int]
    ends: list[int] = field(init=False)
    content: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", [*accumulate(part.rows for part in self.parts)])
        ids = [CONTENT + part.key + row for part in self.parts for row in range(part.rows)]
        object.__setattr__(self, "content", ids)
        assert self.ends[-1:] == [len(self.positions)] or not self.parts, "an embedding without a position"

    @property
    def embeddings(self) -> bool:
        """Whether these are embeddings that the prompt gives, not images: their rows have no places."""
        return bool(self.parts) and not self.parts[0].places.size

    @property
    def rows(self) -> int:
        """Number of embeddings."""
        return len(self.positions)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """For each part, the positions of its first embedding and of the token behind its last one."""
        starts = [0, *self.ends[:-1]]
        return [
            (self.positions[start], self.positions[end - 1] + 1)
            for start, end in zip(starts, self.ends, strict=True)
        ]

    def keyed(self, tokens: list[int]) -> list[int]:
        """Known tokens of a sequence, with the ids of `content` in their places."""
        keys = [*tokens]
        for position, key in zip(self.positions, self.content, strict=True):
            keys[position] = key
        return keys

    def seen_from(self, start: int) -> tuple[ImagePart, ...]:
        """The parts with an embedding at a position of at least `start`."""
        first = bisect_left(self.positions, start)
        return tuple(part for part, end in zip(self.parts, self.ends, strict=True) if end > first)

    def placed(self, tokens: list[int], start: int, ids: list[int]) -> list[int]:
        """The tokens at positions from `start` on, with these ids of all embeddings in their places."""
        first, last = (bisect_left(self.positions, at) for at in (start, start + len(tokens)))
        placed = [*tokens]
        for index in range(first, last):
            placed[self.positions[index] - start] = ids[index]
        return placed
