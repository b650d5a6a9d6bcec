"""Provides services with the models of a server, and with LoRA adapters of the default one."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from jengine import AsyncLLM, EngineDead, InvalidArgument, JengineError, LoRARequest, Tokenizer
from jengine.serving.options import LoraModule
from jengine.spi import Limits, find_lora, lora_tokenizer

if TYPE_CHECKING:  # processes of engines import this module, and no gRPC
    from jengine.serving.calls.call import Call

log = logging.getLogger("jengine.serving")
RESTART_SECONDS = 2.0  # initial estimate for a start from saved programs
Status = Literal["loaded", "loading", "unloaded", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A loaded adapter.

    Attributes:
        module: its name, and its path as it was given.
        number: as vLLM's lora_int_id: 1 for the first adapter that was loaded, and so on.
        folder: where its files are.
        tokenizer: for conversations with it.
        created: when it was loaded, in seconds since 1970.
    """

    module: LoraModule
    number: int
    folder: Path
    tokenizer: Tokenizer
    created: int


class Adapters:
    """Adapters by name. They outlive the engines that load them. Belongs to one event loop.

    Args:
        modules: those that the first engine loads before it serves.
    """

    def __init__(self, modules: Sequence[LoraModule] = ()) -> None:
        self._modules = {module.name: module for module in modules}
        self._loaded: dict[str, Adapter] = {}
        self._numbers = itertools.count(1)
        self._changing = asyncio.Lock()

    def get(self, name: str) -> Adapter | None:
        return self._loaded.get(name)

    def __iter__(self) -> Iterator[Adapter]:
        """In the order in which they were loaded."""
        return iter([*self._loaded.values()])

    def __len__(self) -> int:
        return len(self._loaded)

    async def open(self, llm: AsyncLLM, served: str) -> None:
        """Loads the modules into the first engine. Raises as `load`."""
        for module in self._modules.values():
            await self.load(llm, module, served)

    async def reopen(self, llm: AsyncLLM) -> None:
        """Loads all adapters into another engine. One that cannot be loaded any more is logged, and clients
        do not find it.

        Raises:
            EngineDead: the engine has ended.
        """
        async with self._changing:
            for name, adapter in [*self._loaded.items()]:
                try:
                    await llm.loras.load(_request(adapter))
                except EngineDead:
                    raise
                except JengineError as wrong:
                    del self._loaded[name]
                    log.error("the adapter %s cannot be loaded again, and is not served: %s", name, wrong)

    async def load(
        self,
        llm: AsyncLLM,
        module: LoraModule,
        served: str,
        *,
        path: str | None = None,
        load_inplace: bool = False,
    ) -> Adapter:
        """Loads an adapter while requests run; from now on, clients find it. If the caller is cancelled, the
        adapter is loaded all the same: the engine and this list agree.

        Args:
            served: the model's name, which no adapter may have.
            path: where its files are, if the module's path is a client's.
            load_inplace: replace a loaded adapter of this name; its running requests keep the old one.

        Raises:
            InvalidArgument: the name is in use, or too many adapters are loaded.
            ModelError: the adapter cannot be read, or does not fit the model or its tokenizer.
            EngineDead: the engine has ended.
        """
        loading = asyncio.create_task(self._load(llm, module, served, path, load_inplace))
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(loading)

    async def _load(
        self, llm: AsyncLLM, module: LoraModule, served: str, path: str | None, load_inplace: bool
    ) -> Adapter:
        self._check(module.name, served, load_inplace)
        # not under the lock: a download takes as long as the hub wants
        folder, tokenizer = await asyncio.to_thread(_find, path or module.path, llm.tokenizer)
        async with self._changing:
            known = self._check(module.name, served, load_inplace)
            adapter = Adapter(
                module=module,
                number=next(self._numbers) if known is None else known.number,
                folder=folder,
                tokenizer=tokenizer,
                created=int(time.time()),
            )
            await llm.loras.load(_request(adapter), load_inplace=known is not None)
            self._loaded[module.name] = adapter
            return adapter

    def _check(self, name: str, served: str, load_inplace: bool) -> Adapter | None:
        """The loaded adapter that one of this name replaces. Raises InvalidArgument if it must not."""
        known = self.get(name)
        if name == served:
            raise InvalidArgument("lora_name", name, "is the name of the model itself")
        if known is not None and not load_inplace:
            raise InvalidArgument("lora_name", name, "has already been loaded; load_inplace replaces it")
        return known

    async def unload(self, llm: AsyncLLM, name: str) -> None:
        """Forgets an adapter: from now on, clients do not find it. Its unfinished requests keep it.

        Raises:
            InvalidArgument: there is no such adapter.
            EngineDead: the engine has ended.
        """
        async with self._changing:
            if self._loaded.pop(name, None) is None:
                raise InvalidArgument("lora_name", name, "no adapter of this name is loaded")
            await llm.loras.unload(name)


def _request(adapter: Adapter) -> LoRARequest:
    return LoRARequest(adapter.module.name, adapter.number, str(adapter.folder))


def _find(path: str, tokenizer: Tokenizer) -> tuple[Path, Tokenizer]:
    folder = find_lora(path)
    return folder, lora_tokenizer(tokenizer, folder)


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


class EngineInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Facts about an engine that has started, mostly from jengine.Started. Sent by its process."""

    tokenizer_folder: str | None = None
    dtype: str = ""  # of weights and activations
    devices: str = ""  # their kind and number
    quantization: str = ""  # of the weights; empty: none
    mesh: dict[str, int] = {}  # number of devices along each axis
    kernels: str = ""  # which implementation serves each operation, and why not a newer one
    advice: str = ""  # the fastest quantization for the processor
    programs_compiled: int = 0
    programs_loaded: int = 0
    sampling_defaults: dict[str, Any] = {}  # defaults for requests, where they differ from SamplingParams
    longest_step: float = 0.0
    stream_interval: int = 1
    image_folder: str | None = None  # the folder that says how the model reads images; None: it reads none
    max_images: int = 0  # of a prompt
    image_rows: int = 0  # the most embeddings of an image
    image_processing: dict[str, Any] = {}  # mm_processor_kwargs
    chat_template: str | None = None  # the one that replaces those of the tokenizer's folder
    page_events: EventSource | None = None  # where it publishes them; None: nowhere
    pages: PagesInfo = NO_PAGES  # how it exchanges pages with others


class ModelInfo(EngineInfo, frozen=True, kw_only=True):
    """Facts about the model, available as long as the server runs, even without an engine: those of its
    engine, and more.

    Attributes:
        name: the name that clients see and may request.
        limits: limits of requests that the engine can serve.
        has_chat_template: whether the model can chat.
        reads_images: whether it reads images.
    """

    name: str
    limits: Limits
    has_chat_template: bool = False
    reads_images: bool = False


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

    async def use(self, name: str, call: Call) -> ModelProvider | None:
        """The model of this name, loaded if necessary, until the call is done; an empty name is the default
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
    """The ServedModels of a server with one model, whose AsyncLLM is never replaced.

    Attributes:
        aliases: further names of the model.
    """

    llm: AsyncLLM
    info: ModelInfo
    retry_seconds: float = RESTART_SECONDS
    adapters: Adapters = field(default_factory=Adapters)
    aliases: Sequence[str] = ()

    async def use(self, name: str, call: Call) -> ModelProvider | None:
        return self if name in ("", self.info.name, *self.aliases) else None

    def listed(self) -> Sequence[ListedModel]:
        return [ListedModel(name, "loaded", self.info) for name in (self.info.name, *self.aliases)]

    def running(self) -> Sequence[AsyncLLM]:
        return (self.llm,)

    @property
    def max_num_seqs(self) -> int:
        return self.info.limits.max_num_seqs
