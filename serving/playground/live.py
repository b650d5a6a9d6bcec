"""The engine's records for open pages: read once for all of them, and only while there are any."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from jengine import AsyncLLM, EngineDead, Readers, explain
from jengine.serving.calls.model_provider import ModelProvider
from jengine.serving.calls.overload import Busy
from jengine.serving.playground.view import EngineView

INTERVAL = 0.5  # seconds between two events
EXPLAIN_SECONDS = 3.0  # seconds between two explanations
MOST_VIEWERS = 16
MOST_EVENTS = 8  # maximum number of events that wait for a viewer; older ones are dropped

log = logging.getLogger("jengine.serving")


class Viewer:
    """An open page, and the events that wait for it."""

    def __init__(self) -> None:
        self._events: deque[str] = deque(maxlen=MOST_EVENTS)
        self._news = asyncio.Event()

    def put(self, event: str) -> None:
        self._events.append(event)
        self._news.set()

    async def next(self) -> str:
        """Waits for and returns the oldest event."""
        while not self._events:
            self._news.clear()
            await self._news.wait()
        return self._events.popleft()


class LiveFeed:
    """Reads the engine's records. Belongs to one event loop.

    Args:
        readers: returns how the server's clients read their streams.
        why_not_ready: returns None if the model answers.
    """

    def __init__(
        self, models: ModelProvider, readers: Callable[[], Readers], why_not_ready: Callable[[], str | None]
    ) -> None:
        self._models, self._readers, self._why_not_ready = models, readers, why_not_ready
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._llm: AsyncLLM | None = None  # the engine that is viewed
        self._view = EngineView()
        self._engine = 0  # number of engines seen so far
        self._looked = self._explained = 0.0
        self._explanation: dict[str, Any] | None = None

    @contextlib.contextmanager
    def watch(self) -> Iterator[Viewer]:
        """Raises Busy if too many pages are open."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise Busy(
                f"{MOST_VIEWERS} pages already show the engine, the maximum", EXPLAIN_SECONDS, "viewers"
            )
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="playground")
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        self._looked = time.monotonic() - INTERVAL
        while True:
            event = msgspec.json.encode(await self._event()).decode()
            for viewer in self._viewers:
                viewer.put(event)
            await asyncio.sleep(INTERVAL)

    async def _event(self) -> dict[str, Any]:
        """The current state. If the engine ends meanwhile, the event says so."""
        why = self._why_not_ready()
        event: dict[str, Any] = {"state": "serving" if why is None else "waiting", "why": why}
        try:
            info, llm = self._models.info, self._models.llm
            event["model"] = {
                "name": info.name,
                "chat": info.has_chat_template,
                "images": info.reads_images,
                "devices": info.devices,
                "dtype": info.dtype,
            }
            await self._update(llm)
            event |= self._view.event(llm.load)
        except EngineDead as dead:
            return event | {"state": "waiting", "why": why or str(dead), "engine": self._engine}
        except Exception:
            log.exception("the playground cannot read the engine's records")
            return event | {
                "state": "waiting",
                "why": "the engine's records cannot be read; see the server's log",
            }
        return event | {"engine": self._engine, "explanation": self._explanation}

    async def _update(self, llm: AsyncLLM) -> None:
        if llm is not self._llm:
            self._llm, self._view, self._explanation, self._explained = llm, EngineView(), None, 0.0
            self._engine += 1
        now = time.monotonic()
        seconds, self._looked = now - self._looked + INTERVAL, now  # makes two traces overlap
        self._view.add(await llm.trace(seconds))
        if now - self._explained < EXPLAIN_SECONDS or (window := self._view.window()) is None:
            return
        self._explained, window.readers = now, self._readers()
        self._explanation = dataclasses.asdict(await asyncio.to_thread(explain, window))
