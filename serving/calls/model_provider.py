"""Provides services with the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from jengine import AsyncLLM, EngineDead, Limits
from jengine.serving.calls.adapters import Adapters

RESTART_SECONDS = 2.0  # initial estimate for a start from saved programs


class NotReady(EngineDead):
    """The model does not answer yet, or not at the moment. The message is for clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about the model, available as long as the server runs, even without an engine.

    Attributes:
        name: the name that clients see and may request.
        limits: limits of requests that the engine can serve.
        dtype: of weights and activations.
        quantization: of the weights; empty: none.
        devices: their kind and number.
        mesh: number of devices along each axis.
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
    """The model, its adapters, and the AsyncLLM that currently serves them."""

    @property
    def adapters(self) -> Adapters: ...

    @property
    def llm(self) -> AsyncLLM:
        """Raises NotReady while no engine is running."""

    @property
    def info(self) -> ModelInfo:
        """Raises NotReady until the first engine runs."""

    @property
    def retry_seconds(self) -> float:
        """Seconds after which a request that found no engine should be retried."""


@dataclass(frozen=True, slots=True)
class FixedModel:
    """A ModelProvider whose AsyncLLM is never replaced."""

    llm: AsyncLLM
    info: ModelInfo
    retry_seconds: float = RESTART_SECONDS
    adapters: Adapters = field(default_factory=Adapters)
