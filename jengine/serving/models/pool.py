"""The models of a server: the default one is loaded at the start, others when a request names them.

A model is unloaded when no request has used it for a while, or when another one needs its memory: then the
one that is expected to be used least. Programs stay in the cache on disk, so loading a model again compiles
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jengine import AsyncLLM, JengineError, OutOfMemory
from jengine.serving.calls.call import Call
from jengine.serving.calls.model_provider import (
    Adapters,
    ListedModel,
    ModelInfo,
    ModelProvider,
    NotReady,
    Status,
)
from jengine.serving.processes.supervisor import Supervisor
from jengine.spi import BackOff, available_memory

BESIDE = 3 << 29  # bytes that an engine on a CPU takes beside its weights, until it was measured
MEMORY = 600.0  # seconds after which a use counts 1/e
log = logging.getLogger("jengine.serving")


@dataclass(slots=True)
class MemoryNeed:
    """What an engine needs.

    Attributes:
        share: of a GPU's memory that it reserves, gpu_memory_utilization.
        bytes: of the host's memory; an estimate until it was loaded once.
    """

    share: float = 0.0
    bytes: int = BESIDE


# Whether an engine can be started beside the loaded ones.
Fits = Callable[[MemoryNeed, Sequence[MemoryNeed]], bool]


def fits_gpu(wanted: MemoryNeed, loaded: Sequence[MemoryNeed]) -> bool:
    """On GPUs that all engines use. JAX reserves an engine's share when it starts."""
    return wanted.share + sum(need.share for need in loaded) <= 1.0


def fits_host(wanted: MemoryNeed, loaded: Sequence[MemoryNeed]) -> bool:
    """In this machine's memory, or what is left of the container's."""
    return wanted.bytes <= available_memory()


def fits_on(devices: str) -> Fits:
    """What decides for these devices, as ModelInfo.devices names them."""
    return fits_host if devices.rpartition(" ")[2].lower() == "cpu" else fits_gpu


def resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 if this is not known."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Usage:
    """The uses of a model, of which older ones count less: so recency and rate together.

    Attributes:
        last: time of the last use, in monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self.last, self._count, self._at = now, 0.0, now

    def add(self, now: float) -> None:
        self._count, self._at, self.last = self.expected(now) + 1.0, now, now

    def expected(self, now: float) -> float:
        """Uses to expect in the next MEMORY seconds, if uses go on as they did."""
        return self._count * math.exp((self._at - now) / MEMORY)


@dataclass(slots=True, eq=False)
class PooledModel:
    """A model, its engine if it is loaded, and who uses it.

    Attributes:
        users: calls that use it or wait for it.
        loading: the task that loads it, if it is being loaded.
        leaving: whether another model waits for its place: new requests wait, running ones go on.
        keeps_until: monotonic seconds until which it does not have to leave. That is as long as its loading
            took, so a server under more models than it has room for loads at most half of the time.
        again: monotonic seconds from which it may be loaded after a failure.
    """

    name: str
    supervisor: Supervisor
    need: MemoryNeed = field(default_factory=MemoryNeed)
    users: set[Call] = field(default_factory=set)
    usage: Usage = field(default_factory=lambda: Usage(time.monotonic()))
    loading: asyncio.Task[None] | None = None
    leaving: bool = False
    keeps_until: float = 0.0
    failure: str | None = None
    back_off: BackOff = field(default_factory=lambda: BackOff(first=2.0))
    again: float = 0.0

    @property
    def loaded(self) -> bool:
        return self.supervisor.loaded

    @property
    def status(self) -> Status:
        if self.loaded:
            return "loaded"
        return "loading" if self.loading is not None else "failed" if self.failure else "unloaded"

    @property
    def listed(self) -> ListedModel:
        return ListedModel(
            self.name, self.status, self.supervisor.facts, None if self.loaded else self.failure
        )


class ModelPool:
    """A server's ServedModels. Belongs to one event loop.

    Args:
        models: the default model is the first one.
        max_loaded: the most models that are loaded at once; None: what memory allows.
        unload_after: seconds without a request after which a model is unloaded; None: never.
        fits: None: chosen by the default model's devices.
        aliases: further names of the default model.
    """

    def __init__(
        self,
        models: Sequence[PooledModel],
        *,
        max_loaded: int | None = None,
        unload_after: float | None = None,
        fits: Fits | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        self.default = models[0]
        self._models = {model.name: model for model in models}
        self._aliases = aliases
        self._max_loaded, self._unload_after, self._fits = max_loaded, unload_after, fits
        self._changing = asyncio.Lock()  # one model is loaded or unloaded at a time
        self._released = asyncio.Event()
        self._retired = self._closed = False
        self._idle_watch: asyncio.Task[None] | None = None

    # --- the default model, as a ModelProvider ------------------------------------------------------

    @property
    def llm(self) -> AsyncLLM:
        return self.default.supervisor.llm

    @property
    def info(self) -> ModelInfo:
        return self.default.supervisor.info

    @property
    def adapters(self) -> Adapters:
        return self.default.supervisor.adapters

    @property
    def retry_seconds(self) -> float:
        return self.default.supervisor.retry_seconds

    # --- all models ---------------------------------------------------------------------------------

    def __iter__(self) -> Any:
        return iter(self._models.values())

    def listed(self) -> Sequence[ListedModel]:
        _ = self.info  # raises NotReady during the start
        aliases = [self.default.listed._replace(name=alias) for alias in self._aliases]
        return [*(model.listed for model in self), *aliases]

    def running(self) -> Sequence[AsyncLLM]:
        engines = [model.supervisor.llm for model in self if model.supervisor.pid is not None]
        return engines or [self.llm]

    @property
    def max_num_seqs(self) -> int:
        known = [model.supervisor.facts for model in self if model.loaded]
        return sum(facts.limits.max_num_seqs for facts in known if facts) or self.info.limits.max_num_seqs

    @property
    def serving(self) -> bool:
        """Whether clients should send requests. A default model that was unloaded will be loaded again."""
        if self._retired or self.default.supervisor.facts is None:
            return False
        return self.default.supervisor.serving or not self.default.loaded

    def retire(self) -> None:
        """From now on the server counts as not serving, but still answers."""
        self._retired = True
        for model in self:
            model.supervisor.retire()

    async def start(self) -> None:
        """Loads the default model. Cancelling this ends its engine.

        Raises:
            InvalidArgument, ModelError, OutOfMemory, EngineDead: as Supervisor.start.
        """
        began = time.monotonic()
        async with self._changing:
            await self.default.supervisor.start()
            self._started(self.default, began)
        self._fits = self._fits or fits_on(self.info.devices)
        if self._unload_after is not None:
            self._idle_watch = asyncio.create_task(self._unload_idle(self._unload_after), name="idle-models")

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Stops all engines, see Supervisor.close."""
        self._retired = self._closed = True
        tasks = [self._idle_watch, *(model.loading for model in self)]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        await asyncio.gather(*(model.supervisor.close(drain_seconds) for model in self))

    async def use(self, name: str, call: Call) -> ModelProvider | None:
        """ServedModels.use. Requests that arrive during the server's start do not wait."""
        model = self.default if not name or name in self._aliases else self._models.get(name)
        if model is None:
            return None
        if self.default.supervisor.facts is None:
            return self.default.supervisor
        while model.leaving:
            async with self._changing:  # until another one has its place
                pass
        self._lend(model, call)
        if not model.loaded:
            await self._load(model)
        return model.supervisor

    def _lend(self, model: PooledModel, call: Call) -> None:
        model.usage.add(time.monotonic())
        if call in model.users:
            return
        model.users.add(call)

        def give_back(_: object) -> None:
            model.users.discard(call)
            model.usage.last = time.monotonic()
            self._released.set()

        call.add_done_callback(give_back)

    # --- loading ------------------------------------------------------------------------------------

    async def _load(self, model: PooledModel) -> None:
        """Loads a model. Requests that name it together wait for one load, which goes on without them once
        there is room.
        """
        if self._closed:
            raise NotReady("the server is stopping")
        if model.failure is not None and time.monotonic() < model.again:
            raise NotReady(f"{model.name} cannot be loaded: {model.failure}")
        if model.loading is None or model.loading.done():
            model.loading = asyncio.create_task(self._load_now(model), name=f"load {model.name}")
            model.loading.add_done_callback(lambda task: _over(model, task))
        loading = model.loading
        try:
            await asyncio.shield(loading)
        except asyncio.CancelledError:
            if loading.cancelled():
                raise NotReady("the server is stopping") from None
            raise

    async def _load_now(self, model: PooledModel) -> None:
        async with self._changing:
            try:
                await self._make_room(model)
            finally:
                for other in self:
                    other.leaving = False
            log.info("loading %s", model.name)
            began = time.monotonic()
            while True:
                try:
                    await model.supervisor.start()
                    break
                except OutOfMemory as full:
                    if not await self._unload_least(f"{model.name} needs its memory"):
                        raise self._failed(model, full) from full
                except JengineError as wrong:
                    raise self._failed(model, wrong) from wrong
            self._started(model, began)
            log.info("%s is loaded, in %.1f s", model.name, time.monotonic() - began)

    def _failed(self, model: PooledModel, error: JengineError) -> NotReady:
        model.failure = str(error)
        model.again = time.monotonic() + model.back_off.after(0.0)
        log.error("%s cannot be loaded: %s", model.name, error)
        return NotReady(f"{model.name} cannot be loaded: {error}")

    def _started(self, model: PooledModel, began: float) -> None:
        now = time.monotonic()
        model.failure, model.back_off = None, BackOff(first=2.0)
        model.usage.last, model.keeps_until = now, now + (now - began)
        if (pid := model.supervisor.pid) is not None:
            model.need.bytes = resident(pid) or model.need.bytes

    async def _make_room(self, wanted: PooledModel) -> None:
        """Unloads models until the wanted one may be loaded. If requests run in all of them, the one that is
        expected to be used least takes no new ones, so that it becomes idle.

        Raises:
            NotReady: no request waits for the wanted one any more.
        """
        while (why := self._why_not(wanted)) is not None:
            if not wanted.users:
                raise NotReady(f"no request waits for {wanted.name}")
            self._released.clear()
            if await self._unload_least(why):
                continue
            now = time.monotonic()
            leaving = self._least([model for model in self if model.loaded], now)
            leaving.leaving = leaving.leaving or now >= leaving.keeps_until
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._released.wait(), None if leaving.leaving else leaving.keeps_until - now
                )

    def _why_not(self, wanted: PooledModel) -> str | None:
        """Why the model cannot be loaded yet, if others could be unloaded for it."""
        loaded = [model for model in self if model.loaded]
        if not loaded:
            return None
        if self._max_loaded is not None and len(loaded) >= self._max_loaded:
            return f"{wanted.name} takes its place"
        if self._fits is not None and not self._fits(wanted.need, [model.need for model in loaded]):
            return f"{wanted.name} needs its memory"
        return None

    async def _unload_least(self, why: str) -> bool:
        """Unloads the model without users that is expected to be used least. Returns False if there is
        none.
        """
        now = time.monotonic()
        idle = [model for model in self if model.loaded and not model.users]
        if not idle:
            return False
        await self._unload(self._least(idle, now), why)
        return True

    def _least(self, models: list[PooledModel], now: float) -> PooledModel:
        """The one that is expected to be used least; one that leaves already goes first."""
        return min(models, key=lambda model: (not model.leaving, model.usage.expected(now), model.usage.last))

    async def _unload(self, model: PooledModel, why: str) -> None:
        log.info("unloading %s: %s", model.name, why)
        if (pid := model.supervisor.pid) is not None:
            model.need.bytes = max(resident(pid), model.need.bytes)
        await model.supervisor.unload()

    async def _unload_idle(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(min(max(seconds / 4, 0.02), 5.0))
            for model in self:
                if _idle(model, seconds):
                    async with self._changing:
                        if _idle(model, seconds):  # still
                            await self._unload(model, f"no request for {seconds:g} s")


def _idle(model: PooledModel, seconds: float) -> bool:
    return model.loaded and not model.users and time.monotonic() >= model.usage.last + seconds


def _over(model: PooledModel, task: asyncio.Task[None]) -> None:
    if model.loading is task:
        model.loading = None
    if not task.cancelled():
        task.exception()  # callers have it, if there are any left
