"""The names that scripts import from vLLM's module of the same name."""

from __future__ import annotations

from enum import StrEnum

from jengine.core.beam_params import BeamSearchParams
from jengine.core.request import SamplingParams
from jengine.core.structured_outputs import StructuredOutputs

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

StructuredOutputsParams = GuidedDecodingParams = StructuredOutputs


class RequestOutputKind(StrEnum):
    """What each output of AsyncLLM holds; the values are those of `output_kind`."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final"
