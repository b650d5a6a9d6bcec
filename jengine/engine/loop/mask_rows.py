"""A sequence's rows of a step's token mask."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List

import numpy as np

from jengine.base.errors import JengineError
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import MOST_DRAFTS

# Tokens of a sequence in the step that is planned and in the one that is not read yet.
AHEAD = 2 * (1 + MOST_DRAFTS)


def needs_mask(sequence: Sequence) -> bool:
    """Whether the next step must wait for the sequence's mask."""
    mask = sequence.request.mask
    return mask is not None and mask.free() <= AHEAD


def masked_rows(plan: StepPlan, by_number: Mapping[int, Sequence]) -> list[tuple[int, Sequence, List[int]]]:
    """First sampler rows that have a mask, with their sequences, if these have not ended, and drafts."""
    masked = list[tuple[int, Sequence, List[int]]]()
    for row, sample in enumerate(plan.samples):
        sequence, span = by_number.get(sample.seq), plan.spans[sample.span]
        if sequence is not None and needs_mask(sequence):
            if not span.guesses:
                masked.append((row, sequence, ()))
            elif not sample.offset:
                masked.append((row, sequence, span.following or ()))
    return masked


def fill_masks(rows: np.ndarray, sequence: Sequence, drafts: List[int]) -> tuple[int, Exception] | None:
    """Writes a sequence's masks: for its next token, and for those that follow each of the drafts.

    Stops at a draft that is not allowed: the rows behind it never count.

    Args:
        rows: uint32 [1 + drafts, words], all set.

    Returns:
        The number of drafts after which no mask could be computed, at least 1, and the error, which concerns
        the request only if so many drafts count.

    Raises:
        JengineError: no token is allowed.
    """
    mask, taken = sequence.request.mask, 0
    assert mask is not None
    try:
        for number, words in enumerate(rows):
            try:
                fill_mask(words, sequence, number)
            except Exception as error:
                if not number:
                    raise
                return number, error
            if number < len(drafts):
                draft = drafts[number]
                if not words[draft // 32] >> np.uint32(draft % 32) & 1:
                    break
                mask.accept(draft)
                taken += 1
    finally:
        if taken:
            mask.rollback(taken)
    return None


def fill_mask(words: np.ndarray, sequence: Sequence, drafts: int = 0) -> None:
    """Writes a sequence's mask to `words`. Applies min_tokens too, as programs do, to detect an empty mask.

    A complete grammar that nothing may follow ends the output, whatever the other constraints say.

    Args:
        drafts: number of tokens that the mask has accepted beyond those of the sequence.

    Raises:
        JengineError: no token is allowed.
    """
    request = sequence.request
    assert request.mask is not None
    request.mask.fill(words)
    if len(sequence.tokens) + drafts - sequence.prompt_len < request.params.min_tokens:
        tokens = np.array(sequence.suppressed_token_ids, np.int64)
        np.bitwise_and.at(words, tokens // 32, ~(np.uint32(1) << (tokens % 32).astype(np.uint32)))
    if not words.any() and request.mask.is_complete():
        ends = np.array(sequence.eos_token_ids, np.int64)
        np.bitwise_or.at(words, ends // 32, np.uint32(1) << (ends % 32).astype(np.uint32))
    if not words.any():
        raise JengineError(
            "structured_outputs, allowed_token_ids, bad_words and min_tokens together allow no token"
        )
