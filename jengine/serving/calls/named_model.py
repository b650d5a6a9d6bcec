"""The model that a request names: one of the server's, or an adapter."""

from __future__ import annotations

from typing import NamedTuple

from jengine import AsyncLLM, Tokenizer
from jengine.serving.calls.call import Call
from jengine.serving.calls.errors import Refusal, not_found
from jengine.serving.calls.model_provider import Adapter, ListedModel, ModelProvider, ServedModels


class NamedModel(NamedTuple):
    """A model that a request has named, and may use until it is done.

    Attributes:
        name: for answers.
        provider: the model itself, or the one that the adapter changes.
        adapter: None: the model alone.
    """

    name: str
    provider: ModelProvider
    adapter: Adapter | None = None

    @property
    def llm(self) -> AsyncLLM:
        """Raises NotReady while no engine is running."""
        return self.provider.llm

    @property
    def max_model_len(self) -> int:
        return self.provider.info.limits.sequence.max_model_len

    @property
    def lora(self) -> str | None:
        """The adapter's name, for the engine."""
        return None if self.adapter is None else self.name

    @property
    def tokenizer(self) -> Tokenizer:
        """For conversations: it has the chat templates."""
        return self.llm.tokenizer if self.adapter is None else self.adapter.tokenizer


async def named_model(name: str, models: ServedModels, call: Call) -> NamedModel:
    """The model of this name, loaded if necessary; an empty name is the default model.

    Raises:
        Refusal: there is none.
        NotReady: it cannot be loaded.
    """
    if (provider := await models.use(name, call)) is not None:
        return NamedModel(provider.info.name, provider)
    if (adapter := models.adapters.get(name)) is None:
        raise no_model(name, models)
    provider = await models.use("", call)
    assert provider is not None
    return NamedModel(name, provider, adapter)


def listed_model(name: str, models: ServedModels) -> ListedModel | Adapter:
    """The model of this name, loaded or not; an empty name is the default model. Raises Refusal if there is
    none.
    """
    listed = models.listed()
    match = next((model for model in listed if name in ("", model.name)), models.adapters.get(name))
    if match is None:
        raise no_model(name, models)
    return match


def no_model(name: str, models: ServedModels) -> Refusal:
    """The error for a name that no model has."""
    names = [model.name for model in models.listed()]
    count = len(models.adapters)
    others = f" and {count} adapters; /v1/models lists them" if count else ""
    has = f"one model: {names[0]}" if len(names) == 1 else f"{len(names)} models: {', '.join(names)}"
    return not_found("model", name, f"this server has {has}{others}")
