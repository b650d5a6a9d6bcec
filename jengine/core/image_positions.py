"""Positions of three numbers (mrope): time, row and column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jengine.core.images import VISUAL, PromptImages


def mrope(tokens: Sequence[int], grids: Sequence[tuple[int, int]]) -> tuple[np.ndarray, int]:
    """Positions of a prompt's tokens, and what to add to the indices of the tokens that follow it.

    A text token has the same number three times. An image has one time, and its rows and columns count from
    there; text goes on after the largest number.

    Args:
        tokens: ids, with VISUAL at embedding rows.
        grids: height and width of each image's rows, in the order of the images.

    Returns:
        int32 [3, tokens], and the difference, 0 or less.
    """
    out = np.empty((3, len(tokens)), np.int32)
    images, visual = iter(grids), np.asarray(tokens, np.int64) == VISUAL
    at = position = 0
    while at < len(tokens):
        if visual[at]:
            height, width = next(images)
            end = at + height * width
            places = np.mgrid[:1, :height, :width].reshape(3, -1)
            out[:, at:end] = position + places
            position += max(height, width)
        else:
            later = np.flatnonzero(visual[at:])
            end = at + int(later[0]) if len(later) else len(tokens)
            out[:, at:end] = position + np.arange(end - at)
            position += end - at
        at = end
    return out, position - len(tokens)


def turned(images: PromptImages) -> tuple[np.ndarray, int]:
    """What the tokens of a prompt rotate with, less their indices: int32 [tokens, 3], up to the last
    embedding; and the same number of all tokens behind, three times.
    """
    count = images.positions[-1] + 1
    tokens = np.zeros(count, np.int64)
    tokens[images.positions] = VISUAL
    positions, after = mrope(tokens, [part.grid for part in images.parts])  # type: ignore[arg-type]
    return positions.T - np.arange(count, dtype=np.int32)[:, None], after
