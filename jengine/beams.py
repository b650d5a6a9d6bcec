"""Beam search: what a user asks for, and what comes back. Names and meanings follow vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from jengine.checks import check_number, check_whole
from jengine.display import answer_html, counted, short
from jengine.errors import InvalidArgument
from jengine.request import MAX_LOGPROBS, FinishReason, Logprob, SamplingParams

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2  # a step looks at twice as many candidates, whose log probabilities the sampler gives
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How beams are searched. Each step extends every beam by its 2 x beam_width likeliest tokens and keeps the beam_width
    best of all. Those that end with an end-of-sequence token are set aside; at the end the best of these and of the beams are returned.

    Args:
        beam_width: beams, at most MAX_BEAM_WIDTH.
        max_tokens: tokens generated at most.
        ignore_eos: go on after end-of-sequence tokens.
        temperature: above 0, each beam has a sampled token among its candidates. Log probabilities are those of the raw logits.
        length_penalty: a beam's score is its cumulative log probability over its length to this power. The length counts the prompt, but no
            end-of-sequence token. In [-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY].
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

    # As of SamplingParams, for who takes either.
    structured_outputs: ClassVar[None] = None
    skip_special_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("beam_width", self.beam_width, 1, None)
        if self.beam_width > MAX_BEAM_WIDTH:
            limit = (
                f"at most {MAX_BEAM_WIDTH}: a step needs the log probabilities of twice as many tokens, and samplers give {MAX_LOGPROBS}"
            )
            raise InvalidArgument("beam_width", self.beam_width, limit)
        limit = f"in [{-MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
        check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY, limit)
        check_whole("max_tokens", self.max_tokens, 1, None)
        self.sampling()

    @property
    def n(self) -> int:
        """Completions."""
        return self.beam_width

    def sampling(self, logprobs: int | None = None) -> SamplingParams:
        """What a request has beside this.

        Raises:
            InvalidArgument: a value out of range.
        """
        return SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=logprobs,
        )


GenerationParams = SamplingParams | BeamSearchParams


def split(params: GenerationParams) -> tuple[SamplingParams, BeamSearchParams | None]:
    """A request's sampling parameters, and its beam search, if it is one."""
    return (params.sampling(), params) if isinstance(params, BeamSearchParams) else (params, None)


@dataclass(slots=True, kw_only=True)
class BeamSearchSequence:
    """A beam.

    Attributes:
        tokens: ids of the prompt and the output, an end-of-sequence token included.
        logprobs: of each position of the output, those of its candidates.
        cum_logprob: of the output, natural logarithm.
        text: of all tokens.
        finish_reason: "stop" where it ends with an end-of-sequence token.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # as with vLLM's, there is none

    def __repr__(self) -> str:
        return f"BeamSearchSequence({short(self.text or '')}, {self._note()})"

    def _note(self) -> str:
        return f"{counted(len(self.tokens), 'token')}, cum_logprob={self.cum_logprob:.4g}, finish_reason={self.finish_reason!r}"


@dataclass(slots=True)
class BeamSearchOutput:
    """A prompt's beams, the best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)

    def _repr_html_(self) -> str:
        return answer_html("", [(beam.text or "", beam._note()) for beam in self.sequences])
