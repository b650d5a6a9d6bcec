"""Methods of LLM and AsyncLLM for operations on the engine; see engine/operations.py."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jengine.api.backend import Backend, Done
from jengine.base.errors import InvalidArgument, JengineError
from jengine.core.lora import LoraInfo, LoRARequest
from jengine.core.service_level import one_each
from jengine.engine.operations import (
    GetTrace,
    ListLoras,
    LoadLora,
    Operation,
    ResetPrefixCache,
    SetStrategy,
    UnloadLora,
    WriteProfile,
)
from jengine.insight.explanations.explain import Explanation, explain
from jengine.insight.profiling.data import ProfileOptions
from jengine.insight.recording.cost_report import CostReport
from jengine.insight.recording.trace import Trace

if TYPE_CHECKING:  # an AsyncLLM over a remote engine needs no jax
    from jengine.api.shared_engine import SharedEngine

LoraRequests = (
    LoRARequest | str | Sequence[LoRARequest | str | None] | None
)  # one for all prompts, or one each


class EngineMethods(ABC):
    """LLM's."""

    _shared: SharedEngine

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; running requests keep their pages. Returns whether it was done.

        Raises:
            EngineDead: as `generate`.
        """
        return self._shared.do(ResetPrefixCache())

    def set_strategy(self, strategy: str) -> None:
        """Change the strategy, from the next step on; see EngineConfig.strategy.

        Raises:
            InvalidArgument: there is no such strategy, or this batching mode excludes it.
            EngineDead: as `generate`.
        """
        self._shared.do(SetStrategy(strategy))

    def load_lora(
        self,
        lora: LoRARequest | str,
        *,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        load_inplace: bool = False,
    ) -> LoraInfo:
        """Load an adapter while other threads' requests run: into host memory, and onto the devices before
        the first request that uses it. Nothing is compiled.

        Args:
            lora: its name and path; or only its name, with `config` and `tensors`.
            config: the contents of adapter_config.json, such as {"r": 8, "lora_alpha": 16}.
            tensors: numpy or JAX arrays by the names of adapter_model.safetensors. They are copied.
            load_inplace: replace the loaded adapter of this name; running requests keep the old one.

        Raises:
            InvalidArgument: an engine without enable_lora, a name that is in use, or too many adapters.
            ModelError: the adapter does not fit this model; the message names the module.
            EngineDead: as `generate`.
        """
        return self._shared.do(load_lora(lora, config, tensors, load_inplace=load_inplace))

    def unload_lora(self, name: str) -> None:
        """Forget an adapter. Requests that use it keep it until they end; later ones are rejected.

        Raises:
            InvalidArgument: no adapter of this name is loaded.
            EngineDead: as `generate`.
        """
        self._shared.do(UnloadLora(name))

    def list_loras(self) -> list[LoraInfo]:
        """The loaded adapters, in the order in which they were loaded.

        Raises:
            EngineDead: as `generate`.
        """
        return self._shared.do(ListLoras())

    def _loaded(self, lora_request: LoraRequests, count: int) -> list[str | None]:
        """The names of the adapters of `count` prompts. Loads those that are not loaded yet.

        Raises:
            InvalidArgument: neither one nor `count` requests, or as `load_lora`.
        """
        if lora_request is None:
            return [None] * count
        each = lora_requests(lora_request, count)
        known = {info.name for info in self.list_loras()}
        for lora in dict.fromkeys(each):
            if lora is not None and lora.lora_name not in known:
                self._shared.do(load_lora(lora, None, None, evict=True))
        return [None if lora is None else lora.lora_name for lora in each]

    def costs(self) -> CostReport:
        """Report what steps cost on this machine: measured at warm-up, refined by every step, saved for the
        next start. The report is shown as a table; in a notebook also as a plot, if matplotlib is installed.
        May be called from any thread.

        Raises:
            EngineDead: after `close`.
        """
        return self._shared.engine.costs()

    def trace(self, seconds: float | None = None) -> Trace:
        """Return what the engine did in the last `seconds`, or in the last 8192 steps; it always records
        them. `trace().save("trace.json")` writes a file for https://ui.perfetto.dev. May be called from any
        thread.

        Raises:
            EngineDead: after `close`.
        """
        return self._shared.engine.trace(seconds)

    def explain(self, seconds: float = 60.0) -> Explanation:
        """Find the engine's bottlenecks in the last `seconds`, with the evidence, the option to change and
        the predicted effect. May be called from any thread.

        Raises:
            EngineDead: after `close`.
        """
        return explain(self.trace(seconds))


class AsyncEngineMethods(ABC):
    """AsyncLLM's.

    Attributes:
        lora_names: adapters that were loaded here, by name. Requests may name these.
    """

    backend: Backend
    lora_names: dict[str, LoraInfo]
    _loading: dict[str, asyncio.Future[LoraInfo]]  # by name

    @abstractmethod
    async def do[T](self, operation: Operation[T]) -> T:
        """See AsyncLLM."""

    @abstractmethod
    def _order(self, operation: Operation[Any], done: Done) -> None:
        """Starts an operation, in any thread. Raises as `do`."""

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; running requests keep their pages. Returns whether it was done.

        Raises:
            EngineDead: the engine has failed, or was closed.
        """
        return await self.do(ResetPrefixCache())

    def set_strategy(self, strategy: str) -> None:
        """Change the strategy, from the next step on; see EngineConfig.strategy. May be called in any thread.

        Raises:
            InvalidArgument: there is no such strategy, or the engine's batching mode excludes it.
            EngineDead: the engine has failed, or was closed.
        """
        self._order(SetStrategy(strategy), lambda answer, error: None)

    async def load_lora(
        self,
        lora: LoRARequest | str,
        *,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        load_inplace: bool = False,
    ) -> LoraInfo:
        """Load an adapter while requests run; see `LLM.load_lora`."""
        info = await self.do(load_lora(lora, config, tensors, load_inplace=load_inplace))
        self.lora_names[info.name] = info
        return info

    async def unload_lora(self, name: str) -> None:
        """Forget an adapter; see `LLM.unload_lora`."""
        self.lora_names.pop(name, None)  # first, since the engine would end later requests with an error
        await self.do(UnloadLora(name))

    async def list_loras(self) -> list[LoraInfo]:
        """The loaded adapters; see `LLM.list_loras`."""
        return await self.do(ListLoras())

    async def _loaded(self, lora_request: LoRARequest | str | None) -> None:
        """Loads the adapter of a request, unless it is loaded. Raises as `load_lora`."""
        lora = LoRARequest(lora_request) if isinstance(lora_request, str) else lora_request
        if lora is None or lora.lora_name in self.lora_names:
            return
        if lora.lora_name not in self._loading:  # several requests may name it at the same time
            self._loading[lora.lora_name] = asyncio.ensure_future(self._load(lora))
        try:
            await asyncio.shield(self._loading[lora.lora_name])
        finally:
            if (task := self._loading.get(lora.lora_name)) is not None and task.done():
                del self._loading[lora.lora_name]

    async def _load(self, lora: LoRARequest) -> LoraInfo:
        info = await self.do(load_lora(lora, None, None, evict=True))
        self.lora_names = {one.name: one for one in await self.list_loras()}
        return info

    def _known(self, lora_request: LoRARequest | str | None) -> str | None:
        """The name of a request's adapter. Raises InvalidArgument if it is not loaded."""
        if lora_request is None:
            return None
        [lora] = lora_requests(lora_request, 1)
        assert lora is not None
        self.backend.limits.require_lora("lora_request", lora.lora_name)
        if lora.lora_name not in self.lora_names:
            raise InvalidArgument("lora_request", lora.lora_name, "is not loaded; load_lora loads it")
        return lora.lora_name

    async def trace(self, seconds: float | None = None) -> Trace:
        """Records of the engine's last `seconds` seconds, or all that are kept; see `LLM.trace`.

        Raises:
            InvalidArgument: `seconds` is not above 0.
            EngineDead: the engine has failed, or was closed.
        """
        return await self.do(GetTrace(seconds))

    async def explain(self, seconds: float = 60.0) -> Explanation:
        """Bottlenecks of the engine in the last `seconds` seconds; see `LLM.explain`. Raises as `trace`."""
        return await asyncio.to_thread(explain, await self.trace(seconds))

    async def profile(self, options: ProfileOptions, folder: Path) -> None:
        """Makes the engine's process write its profile to this folder; see `capture_process`.

        An engine in this process writes none: profile this process instead.

        Raises:
            InvalidArgument: that process is already being profiled.
            EngineDead: the engine has failed, or was closed.
        """
        await self.do(WriteProfile(options, str(folder), os.getpid()))

    def costs(self) -> CostReport:
        """Step costs on this machine; see `LLM.costs`.

        Raises:
            JengineError: the engine runs in another process.
        """
        engine: Any = getattr(self.backend, "engine", None)
        if not hasattr(engine, "costs"):
            raise JengineError("costs are not available here: the engine runs in another process")
        report: CostReport = engine.costs()
        return report


def lora_requests(given: LoraRequests, count: int) -> list[LoRARequest | None]:
    """One adapter, or None, for each of `count` prompts. Text is the name of a loaded one.

    Raises:
        InvalidArgument: neither one nor `count` of them, or not a LoRARequest.
    """
    each = [
        LoRARequest(one) if isinstance(one, str) else one for one in one_each("lora_request", given, count)
    ]
    for one in each:
        if not isinstance(one, LoRARequest | None):
            raise InvalidArgument(
                "lora_request", one, "must be a LoRARequest, or the name of a loaded adapter"
            )
    return each


def load_lora(
    lora: LoRARequest | str,
    config: Mapping[str, Any] | None,
    tensors: Mapping[str, Any] | None,
    *,
    load_inplace: bool = False,
    evict: bool = False,
) -> LoadLora:
    """The operation for these arguments of LLM.load_lora. Raises InvalidArgument if they do not fit."""
    [request] = lora_requests(lora, 1)
    assert request is not None
    if (config is None) != (tensors is None):
        raise InvalidArgument("tensors", type(tensors).__name__, "config and tensors go together")
    if config is None or tensors is None:
        if not request.lora_path:
            raise InvalidArgument("lora_request", request.lora_name, "is not loaded, and has no lora_path")
        return LoadLora(request.lora_name, request.lora_path, load_inplace=load_inplace, evict=evict)
    from safetensors.numpy import save  # imported here, since few callers hand arrays in

    return LoadLora(
        request.lora_name,
        request.lora_path,
        config=dict(config),
        tensors=save({name: _float32(array) for name, array in tensors.items()}),
        load_inplace=load_inplace,
    )


def _float32(array: Any) -> np.ndarray:
    """Any array, such as one of JAX on a device, in host memory."""
    return np.ascontiguousarray(np.asarray(array), np.float32)
