"""The model that a request names: the server's own, or an adapter."""

from __future__ import annotations

from typing import NamedTuple

from jengine import AsyncLLM, Tokenizer
from jengine.serving.calls.adapters import Adapter
from jengine.serving.calls.errors import Refusal, not_found
from jengine.serving.calls.model_provider import ModelProvider


class NamedModel(NamedTuple):
    """A model that clients may name.

    Attributes:
        name: for answers.
        adapter: None: the server's own model.
    """

    name: str
    adapter: Adapter | None = None

    @property
    def lora(self) -> str | None:
        """The adapter's name, for the engine."""
        return None if self.adapter is None else self.name

    def tokenizer(self, llm: AsyncLLM) -> Tokenizer:
        """For conversations: it has the chat templates."""
        return llm.tokenizer if self.adapter is None else self.adapter.tokenizer


def named_model(name: str, models: ModelProvider) -> NamedModel:
    """The model of this name; an empty one is the server's own. Raises Refusal if there is none."""
    served = models.info.name
    if name in ("", served):
        return NamedModel(served)
    if (adapter := models.adapters.get(name)) is None:
        raise no_model(name, models)
    return NamedModel(name, adapter)


def no_model(name: str, models: ModelProvider) -> Refusal:
    """The error for a name that no model has."""
    served = models.info.name
    others = f" and {len(models.adapters)} adapters; /v1/models lists them" if len(models.adapters) else ""
    return not_found("model", name, f"this server has one model: {served}{others}")
