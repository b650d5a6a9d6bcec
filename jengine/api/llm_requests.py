"""What parts of LLM need of the whole to run requests."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jengine.api.loras import Loras
from jengine.api.prompts import Prompt
from jengine.core.beam_params import BeamSearchParams
from jengine.core.pooling import PoolingParams
from jengine.core.request import Request, RequestOutput, SamplingParams
from jengine.core.service_level import ServiceLevel


class LLMRequests(ABC):
    """How LLM makes requests and runs them."""

    loras: Loras

    @abstractmethod
    def _requests(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        level: ServiceLevel | None = None,
        *,
        pooling: PoolingParams | None = None,
        beams: BeamSearchParams | None = None,
        lora_name: str | None = None,
    ) -> list[Request]:
        """Creates and validates a prompt's requests."""

    @abstractmethod
    def _wait_for(self, work: list[list[Request]], desc: str, show: bool) -> list[RequestOutput]:
        """Returns the outputs of prompts' requests when all have ended."""
