"""For type checkers: jengine.vllm.modules makes this module."""

from jengine.api.request_handle import RequestOutputKind as RequestOutputKind
from jengine.core.beam_params import BeamSearchParams as BeamSearchParams
from jengine.core.request import SamplingParams as SamplingParams
from jengine.core.structured_outputs import StructuredOutputs

GuidedDecodingParams = StructuredOutputs
StructuredOutputsParams = StructuredOutputs
