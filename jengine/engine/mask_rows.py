"""A sequence's row of a step's token mask."""

from __future__ import annotations

import numpy as np

from jengine.base.errors import JengineError
from jengine.scheduling.requests.sequence import Sequence


def fill_mask(words: np.ndarray, sequence: Sequence) -> None:
    """Writes a sequence's mask to `words`. Applies min_tokens too, as programs do, to detect an empty mask.

    Raises:
        JengineError: no token is allowed.
    """
    request = sequence.request
    assert request.mask is not None
    request.mask.fill(words)
    if len(sequence.tokens) - sequence.prompt_len < request.params.min_tokens:
        tokens = np.array(sequence.suppressed_token_ids, np.int64)
        np.bitwise_and.at(words, tokens // 32, ~(np.uint32(1) << (tokens % 32).astype(np.uint32)))
    if not words.any():
        raise JengineError(
            "structured_outputs, allowed_token_ids, bad_words and min_tokens together allow no token"
        )
