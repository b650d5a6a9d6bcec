"""Parameters of a beam search. Names and meanings follow vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jengine.base.checks import check_number, check_whole
from jengine.base.errors import InvalidArgument

# a step considers twice as many candidates, and samplers return MAX_LOGPROBS log probabilities
MAX_BEAM_WIDTH = 10
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How beams are searched. Each step extends every beam by its 2 x beam_width likeliest tokens and keeps
    the beam_width best of all. Those that end with an end-of-sequence token are set aside; at the end the
    best of these and of the beams are returned.

    Args:
        beam_width: the number of beams, at most MAX_BEAM_WIDTH.
        max_tokens: the most tokens to generate.
        ignore_eos: continue after end-of-sequence tokens. The length in a beam's score still leaves out one
            at the end, as in vLLM.
        temperature: above 0, each beam has a sampled token among its candidates. Log probabilities are those
            of the raw logits.
        length_penalty: a beam's score is its cumulative log probability divided by its length to this power.
            The length includes the prompt, and no end-of-sequence token. In [-MAX_LENGTH_PENALTY,
            MAX_LENGTH_PENALTY].
        include_stop_str_in_output: keep an end-of-sequence token's text at the end of the text.

    Raises:
        InvalidArgument: naming the field, the value and the limit.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    # As in SamplingParams, for code that accepts both.
    structured_outputs: ClassVar[None] = None
    skip_special_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("beam_width", self.beam_width, 1, None)
        if self.beam_width > MAX_BEAM_WIDTH:
            limit = f"at most {MAX_BEAM_WIDTH}: a step needs the log probabilities of twice as many tokens"
            raise InvalidArgument("beam_width", self.beam_width, limit)
        limit = f"in [{-MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
        check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY, limit)
        check_whole("max_tokens", self.max_tokens, 1, None)
        check_number("temperature", self.temperature, 0.0, math.inf, "a finite number, at least 0")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(name, getattr(self, name), "must be True or False")

    @property
    def n(self) -> int:
        """Completions."""
        return self.beam_width
