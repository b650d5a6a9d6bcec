"""Beam search: sampling parameters of its requests, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field

from jengine.base.display import answer_html, counted, short
from jengine.core.beam_params import BeamSearchParams
from jengine.core.request import FinishReason, Logprob, SamplingParams

GenerationParams = SamplingParams | BeamSearchParams


def split(params: GenerationParams) -> tuple[SamplingParams, BeamSearchParams | None]:
    """Sampling parameters of a request and, if it is one, its beam search."""
    return (sampling_of(params), params) if isinstance(params, BeamSearchParams) else (params, None)


def sampling_of(params: BeamSearchParams, logprobs: int | None = None) -> SamplingParams:
    """Sampling parameters of a beam search's request."""
    return SamplingParams(
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        include_stop_str_in_output=params.include_stop_str_in_output,
        logprobs=logprobs,
    )


@dataclass(slots=True, kw_only=True)
class BeamSearchSequence:
    """A beam.

    Attributes:
        tokens: ids of the prompt and the output, an end-of-sequence token included.
        logprobs: log probabilities of the candidates at each position of the output.
        cum_logprob: cumulative log probability of the output (natural logarithm).
        text: text of all tokens except special ones.
        finish_reason: "stop" if it ends with an end-of-sequence token.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # as in vLLM, never set

    def __repr__(self) -> str:
        return f"BeamSearchSequence({short(self.text or '')}, {self._note()})"

    def _note(self) -> str:
        return (
            f"{counted(len(self.tokens), 'token')}, cum_logprob={self.cum_logprob:.4g},"
            f" finish_reason={self.finish_reason!r}"
        )


@dataclass(slots=True)
class BeamSearchOutput:
    """A prompt's beams, the best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)

    def _repr_html_(self) -> str:
        return answer_html("", [(beam.text or "", beam._note()) for beam in self.sequences])
