"""Provides services with the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from jengine import AsyncLLM, EngineDead
from jengine.serving.calls.adapters import Adapters
from jengine.spi import Limits

RESTART_SECONDS = 2.0  # initial estimate for a start from saved programs
Status = Literal["loaded", "loading", "unloaded", "failed"]


class NotReady(EngineDead):
    """The model does not answer yet, or not at the moment. The message is for clients."""


class EventSource(NamedTuple):
    """Where an engine publishes page events: addresses of ZeroMQ, see the option kv_events_config."""

    endpoint: str
    replay_endpoint: str | None
    topic: str


class PagesInfo(NamedTuple):
    """How an engine exchanges pages with others.

    Attributes:
        at: host:port where it serves those of prompts that it has computed; None: it does not.
        peers: from which it may fetch: host:port, or host:* for any port.
        engine_id: its name for routers.
    """

    at: str | None = None
    peers: tuple[str, ...] = ()
    engine_id: str | None = None


NO_PAGES = PagesInfo()


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
        kernels: which implementation serves each operation, and why not a newer one.
        has_chat_template: whether the model can chat.
        page_events: where its engine publishes them; None: nowhere.
        reads_images: whether it reads images.
        pages: how its engine exchanges pages with others.
    """

    name: str
    limits: Limits
    dtype: str
    quantization: str = ""
    devices: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    kernels: str = ""
    has_chat_template: bool = False
    page_events: EventSource | None = None
    reads_images: bool = False
    pages: PagesInfo = NO_PAGES


class ModelProvider(Protocol):
    """A model, its adapters, and the AsyncLLM that currently serves them."""

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


class User(Protocol):
    """What uses a model: a call, or a part of one."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Registers a function to call when it no longer uses the model."""


class ListedModel(NamedTuple):
    """A model that a server offers.

    Attributes:
        info: None until it was loaded once.
        why: the reason if it failed to load.
    """

    name: str
    status: Status
    info: ModelInfo | None = None
    why: str | None = None


class ServedModels(ModelProvider, Protocol):
    """All models of a server. As a ModelProvider, it is the default model."""

    async def use(self, name: str, user: User) -> ModelProvider | None:
        """The model of this name, loaded if necessary, until its user is done; an empty name is the default
        model. None: there is no such model.

        Raises:
            NotReady: it cannot be loaded.
        """

    def listed(self) -> Sequence[ListedModel]:
        """All models, the default one first. Raises NotReady until the first engine runs."""

    def running(self) -> Sequence[AsyncLLM]:
        """All engines that run. Raises NotReady if there are none."""

    @property
    def max_num_seqs(self) -> int:
        """The most sequences that run at once, in all engines."""


@dataclass(frozen=True, slots=True)
class FixedModel:
    """The ServedModels of a server with one model, whose AsyncLLM is never replaced."""

    llm: AsyncLLM
    info: ModelInfo
    retry_seconds: float = RESTART_SECONDS
    adapters: Adapters = field(default_factory=Adapters)

    async def use(self, name: str, user: User) -> ModelProvider | None:
        return self if name in ("", self.info.name) else None

    def listed(self) -> Sequence[ListedModel]:
        return (ListedModel(self.info.name, "loaded", self.info),)

    def running(self) -> Sequence[AsyncLLM]:
        return (self.llm,)

    @property
    def max_num_seqs(self) -> int:
        return self.info.limits.max_num_seqs
