"""The model behind the services."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from jengine import AsyncLLM, Limits

RESTART_SECONDS = 2.0  # that a start from saved programs takes, where none has been seen


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is served: known as long as the server lives, whether the engine does or not.

    Attributes:
        name: what clients see and may ask for.
        limits: what the engine can answer at all.
        dtype: of weights and activations.
        quantization: of the weights; empty is none.
        devices: how many of which kind.
        mesh: devices along each of its axes.
        has_chat_template: whether the model can chat.
    """

    name: str
    limits: Limits
    dtype: str
    quantization: str = ""
    devices: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    has_chat_template: bool = False


class ModelProvider(Protocol):
    """The model, and the AsyncLLM that answers for it now."""

    @property
    def llm(self) -> AsyncLLM:
        """Raises EngineDead while none is running."""

    @property
    def info(self) -> ModelInfo:
        """Raises EngineDead before the first one runs: they are not known yet."""

    @property
    def retry_seconds(self) -> float:
        """When a request that found no engine may come again."""


@dataclass(frozen=True, slots=True)
class FixedModel:
    """A ModelProvider whose AsyncLLM is never replaced."""

    llm: AsyncLLM
    info: ModelInfo
    retry_seconds: float = RESTART_SECONDS
