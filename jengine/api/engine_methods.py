"""Methods of LLM and AsyncLLM for operations on the engine; see engine/operations.py."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine.api.backend import Backend, Done
from jengine.base.errors import JengineError
from jengine.engine.operations import (
    GetTrace,
    Operation,
    ResetPrefixCache,
    SetStrategy,
    WriteProfile,
)
from jengine.insight.explanations.explain import Explanation, explain
from jengine.insight.profiling.data import ProfileOptions
from jengine.insight.recording.cost_report import CostReport
from jengine.insight.recording.trace import Trace

if TYPE_CHECKING:  # an AsyncLLM over a remote engine needs no jax
    from jengine.api.shared_engine import SharedEngine


class EngineMethods(ABC):
    """LLM's."""

    _shared: SharedEngine

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; running requests keep their pages. Returns True, as in vLLM.

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
    """AsyncLLM's."""

    backend: Backend

    @abstractmethod
    async def do[T](self, operation: Operation[T]) -> T:
        """Has the engine do an operation, and returns its answer."""

    @abstractmethod
    def _order(self, operation: Operation[Any], done: Done) -> None:
        """Starts an operation, in any thread. Raises as `do`."""

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; running requests keep their pages. Returns True, as in vLLM.

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
