"""AsyncLLM's methods for inspecting the engine's steps."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jengine.api.backend import Backend
from jengine.errors import InvalidArgument, JengineError
from jengine.explanations.explain import Explanation, explain
from jengine.observe.cost_report import CostReport
from jengine.observe.trace import Trace
from jengine.profiling.data import ProfileOptions


class AsyncInsight(ABC):
    """The part of AsyncLLM that inspects the engine."""

    backend: Backend

    @abstractmethod
    async def _call_engine(self, ask: Callable[[Callable[[Any], None]], None]) -> Any:
        """See AsyncLLM."""

    async def trace(self, seconds: float | None = None) -> Trace:
        """Records of the engine's last `seconds` seconds, or all that are kept; see `LLM.trace`.

        Raises:
            EngineDead: the engine has failed, or was closed.
        """
        trace: Trace = await self._call_engine(partial(self.backend.trace, seconds))
        return trace

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
        why: str = await self._call_engine(partial(self.backend.profile, options, folder))
        if why:
            raise InvalidArgument("profile", "engine", why)

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
