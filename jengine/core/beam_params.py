"""Parameters of a beam search. Names and meanings follow vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from jengine.base.errors import InvalidArgument
from jengine.base.options import check_options, check_whole, number, whole

# a step considers twice as many candidates, and samplers return MAX_LOGPROBS log probabilities
MAX_BEAM_WIDTH = 10
MAX_LENGTH_PENALTY = 10.0

penalty = number(
    f"in [{-MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
)


def beams(name: str, value: Any) -> int:
    check_whole(name, value, 1, None)
    if value > MAX_BEAM_WIDTH:
        limit = f"at most {MAX_BEAM_WIDTH}: a step needs the log probabilities of twice as many tokens"
        raise InvalidArgument(name, value, limit)
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How beams are searched. Each step extends every beam by its 2 x beam_width likeliest tokens and keeps
    the beam_width best of all. Those that end with an end-of-sequence token are set aside; at the end the
    best of these and of the beams are returned.

    Args:
        beam_width: the number of beams, at most MAX_BEAM_WIDTH.
        max_tokens: the most tokens to generate.
        ignore_eos: continue after end-of-sequence tokens.
        temperature: above 0, each beam has a sampled token among its candidates. Log probabilities are those
            of the raw logits.
        length_penalty: a beam's score is its cumulative log probability divided by its length to this power.
            The length includes the prompt, but not an end-of-sequence token at the end, also with ignore_eos
            (as in vLLM). In [-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY].
        include_stop_str_in_output: keep an end-of-sequence token's text at the end of the text.

    Raises:
        InvalidArgument: naming the field, the value and the limit.
    """

    beam_width: Annotated[int, beams]
    max_tokens: Annotated[int, whole(1)]
    ignore_eos: bool = False
    temperature: Annotated[float, number("a finite number, at least 0")] = 0.0
    length_penalty: Annotated[float, penalty] = 1.0
    include_stop_str_in_output: bool = False

    # As in SamplingParams, for code that accepts both.
    structured_outputs: ClassVar[None] = None
    skip_special_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def n(self) -> int:
        """The number of completions: the beam width."""
        return self.beam_width
