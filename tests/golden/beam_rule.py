"""vLLM's rule for beams in a few lines, as a reference. Independent of models."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple


class Found(NamedTuple):
    """A beam's output and its log probability; whether an end-of-sequence token ended it."""

    tokens: list[int]
    cumulative: float
    ended: bool


def beam_search(
    prompt: list[int],
    candidates: Callable[[list[list[int]]], list[dict[int, float]]],
    *,
    width: int,
    steps: int,
    eos: int | None,
    length_penalty: float = 1.0,
    ignore_eos: bool = False,
) -> tuple[list[Found], float]:
    """The best beams, and the smallest difference by which any of the choices was made.

    Args:
        candidates: of each of these sequences, the log probabilities of the tokens that may follow: 2 x width
            or more.
        steps: tokens generated at most.
    """
    beams, completed, margin = [Found([], 0.0, False)], [], float("inf")

    def score(found: Found) -> float:
        tokens = [*prompt, *found.tokens]
        return found.cumulative / (len(tokens) - (tokens[-1] == eos)) ** length_penalty

    for _ in range(steps):
        if not beams:
            break
        following = []
        for beam, likely in zip(beams, candidates([[*prompt, *beam.tokens] for beam in beams])):  # noqa: B905
            for token, logprob in likely.items():
                one = Found([*beam.tokens, token], beam.cumulative + logprob, token == eos and not ignore_eos)
                (completed if one.ended else following).append(one)
        following.sort(key=score, reverse=True)
        if len(following) > width:
            margin = min(margin, following[width - 1].cumulative - following[width].cumulative)
        beams = following[:width]
    best = sorted([*completed, *beams], key=score, reverse=True)
    # as large as log probabilities
    scores = [score(found) * (len(prompt) + steps) ** length_penalty for found in best[: width + 1]]
    margin = min([margin, *[a - b for a, b in itertools.pairwise(scores)]])
    return best[:width], margin
