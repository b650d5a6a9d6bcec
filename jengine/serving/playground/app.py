"""The metrics port with the playground: metrics, probes, the page, live records, and OpenAI's API for the
chat.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import grpc
import msgspec
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jengine import AsyncLLM, EngineDead, Load, Trace, explain
from jengine.serving.calls.errors import Busy, Refusal
from jengine.serving.calls.model_provider import ModelProvider
from jengine.serving.guards.admission import sees_all_clients
from jengine.serving.http.app import application
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.endpoint import OwnHosts, Parts, endpoint, while_connected
from jengine.serving.http.front import page_routes
from jengine.serving.metrics.server_metrics import Pages
from jengine.spi import Readers

MOST_STEPS, MOST_REQUESTS = 4096, 1024  # numbers of records kept
SHOWN_STEPS = 160  # maximum steps in an event, the last ones
SHOWN_HOLDERS = 64  # maximum requests in an event, those with the most pages
SECONDS = 60.0  # period for latencies and explanations
INTERVAL = 0.5  # seconds between two events
EXPLAIN_SECONDS = 3.0  # seconds between two explanations
MOST_VIEWERS = 16
MOST_EVENTS = 8  # maximum number of events that wait for a viewer; older ones are dropped
log = logging.getLogger("jengine.serving")
LIVE = "/page/live"


class EngineView:
    """Accumulates an engine's traces, which may overlap. Bounded."""

    def __init__(self) -> None:
        self._steps: dict[int, Any] = {}  # by number, in order
        self._ended: dict[int, Any] = {}  # requests, likewise
        self._sent = -1  # the last step that an event included
        self._sent_at: float | None = None
        self._trace: Trace | None = None
        self._tile_size = 0

    def add(self, trace: Trace) -> None:
        """Adds recent activity. A step's last times are only known some time later, so a newer record
        replaces an older one.
        """
        self._trace = trace
        self._tile_size = self._tile_size or trace.step_costs.table.tile_size
        self._steps.update({step.number: step for step in trace.steps})
        self._ended.update({request.number: request for request in trace.requests if request.ended})
        _shorten(self._steps, MOST_STEPS)
        _shorten(self._ended, MOST_REQUESTS)

    def window(self) -> Trace | None:
        """A trace of everything known about the last seconds, for explanations."""
        trace = self._trace
        if trace is None:
            return None
        live = [request for request in trace.requests if not request.ended]
        return msgspec.structs.replace(
            trace, steps=[*self._steps.values()], requests=[*self._ended.values(), *live]
        ).last(SECONDS)

    def event(self, load: Load) -> dict[str, Any]:
        """New data since the last event, and the current state. Times are in milliseconds."""
        trace = self._trace
        if trace is None:
            return {}
        facts, tile_size = trace.facts, self._tile_size
        news = [step for number, step in self._steps.items() if number > self._sent]
        seconds = trace.taken - self._sent_at if self._sent_at is not None else 0.0
        self._sent, self._sent_at = (news[-1].number if news else self._sent), trace.taken
        decoded = sum(step.rows * step.steps for step in news)
        return {
            "facts": {
                "max_num_seqs": facts.max_num_seqs,
                "max_model_len": facts.max_model_len,
                "page_size": facts.page_size,
                "tile_size": tile_size,
            },
            "running": load.running,
            "waiting": load.waiting,
            "strategy": load.strategy,
            "tokens_per_second": round(decoded / seconds, 1) if seconds > 0.0 else None,
            "pages": self._pages(load),
            "steps": [_step(step, tile_size) for step in news[-SHOWN_STEPS:]],
            "skipped": max(len(news) - SHOWN_STEPS, 0),
            "latency": self._latency(trace.taken - SECONDS),
        }

    def _pages(self, load: Load) -> dict[str, Any]:
        """Pages by state and by holder, as (number of the request, pages). A shared page counts for each
        holder.
        """
        assert self._trace is not None
        live = [request for request in self._trace.requests if not request.ended and request.pages]
        holders = sorted([(request.number, request.pages) for request in live], key=lambda held: -held[1])
        return {
            "all": load.pages,
            "owned": load.pages - load.free_pages,
            "cached": load.cached_pages,
            "holders": sorted(holders[:SHOWN_HOLDERS]),
            "others": sum([pages for _, pages in holders[SHOWN_HOLDERS:]]),
        }

    def _latency(self, since: float) -> dict[str, Any]:
        """Latencies of the requests that ended since then."""
        ended = [
            request for request in self._ended.values() if request.ended >= since and request.first_token
        ]
        return {
            "requests": len(ended),
            "queue": percentiles([r.scheduled - r.arrival for r in ended]),
            "first_token": percentiles([r.first_token - r.arrival for r in ended]),
            "per_token": percentiles(
                [(r.ended - r.first_token) / (r.output_tokens - 1) for r in ended if r.output_tokens > 1]
            ),
            "whole": percentiles([r.ended - r.arrival for r in ended]),
        }


def percentiles(seconds: Sequence[float]) -> list[float] | None:
    """The 50th, 90th and 99th percentiles in milliseconds; None if there are no values."""
    if not seconds:
        return None
    ranked = sorted(seconds)
    return [_ms(ranked[round(share * (len(ranked) - 1))]) for share in (0.5, 0.9, 0.99)]


def _step(step: Any, tile_size: int) -> dict[str, Any]:
    """The data that the page draws for a step."""
    return {
        "n": step.number,
        "program": step.name,
        "rows": step.rows,
        "all_rows": step.trunk.rows,
        "tiles": step.tiles,
        "all_tiles": step.trunk.tiles,
        "prompt_tokens": step.prompt_tokens,
        "padded_tokens": step.padded_tokens(tile_size),
        "predicted": _ms(step.predicted),
        "measured": _ms(step.device) if step.device else None,
        "loop": _ms(step.seconds),
        "running": step.running,
        "waiting": step.waiting,
        "reason": step.reason,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _shorten(records: dict[int, Any], limit: int) -> None:
    for number in [*records][: max(len(records) - limit, 0)]:
        del records[number]


Viewer = asyncio.Queue[bytes]  # the events that wait for an open page


def queue_event(viewer: Viewer, event: bytes) -> None:
    """Queues an event; if too many wait, the oldest is dropped."""
    if viewer.full():
        viewer.get_nowait()
    viewer.put_nowait(event)


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
        viewer = Viewer(MOST_EVENTS)
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
            event = msgspec.json.encode(await self._event())
            for viewer in self._viewers:
                queue_event(viewer, event)
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


# Everything comes from this server; inline code is not executed, and text never becomes HTML.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def playground(parts: Parts, pages: Pages) -> ASGIApp:
    """The port's ASGI application. The page itself needs no key; its data and requests do, if there are keys.

    Args:
        pages: pages for metrics and probes.
    """
    feed = LiveFeed(parts.shared.models, parts.shared.pace.readers, parts.why_not_ready)

    async def live(call: HttpCall) -> None:
        if not sees_all_clients():
            raise Refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                "the engine's records need an API key with admin=1",
                cause="admin",
            )
        await while_connected(call, _stream(call, feed))

    config = replace(parts.config, response_store_bytes=0)  # the page refers to no earlier responses
    app = application(
        parts._replace(config=config),
        [
            *page_routes(pages),
            *[
                Route(path, Response(body, headers={**HEADERS, "content-type": kind}), methods=["GET"])
                for path, (body, kind) in assets().items()
            ],
            endpoint(parts, "GET", LIVE, live),
        ],
    )
    return app if parts.authenticator is not None else OwnHosts(app, frozenset(pages))


async def _stream(call: HttpCall, feed: LiveFeed) -> None:
    with feed.watch() as viewer:
        await call.start_events({})
        while True:
            await call.event([await viewer.get()])


@cache
def assets() -> dict[str, tuple[bytes, str]]:
    """(content, type) by path. The page itself is at /, its other files are under /page/."""
    files_by_path = {}
    for file in files("jengine.serving.playground").joinpath("static").iterdir():
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        files_by_path[path] = file.read_bytes(), TYPES[file.name.rpartition(".")[2]]
    return files_by_path
