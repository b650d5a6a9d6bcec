"""One HTTP request and its answer."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.types import Message, Receive, Scope, Send

BODY_SECONDS = 60.0  # in which a request's body must have come
DISCARD_SECONDS = 1.0  # for a body that is not wanted
MOST_CONTAINERS = 2**17  # arrays and objects of a body; each takes a hundred bytes and more

JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"


class BadBody(Exception):
    """A request's body that cannot be used. `status`: HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpCall:
    """A jengine.serving.call.Call.

    Attributes:
        status: that was answered; 0 is none yet.
        unread: whether some of its body has not been read.
        names: where a field of jengine's errors is in this request's body, if elsewhere.
        gone: whether the client has left before the answer's end.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.status, self.gone, self._complete = 0, False, False
        self.unread = True
        self.names: dict[str, str] = {}
        self._callbacks: list[Callable[[Any], None]] = []

    # --- as a Call --------------------------------------------------------------------------------

    def peer(self) -> str:
        host, port = self.scope.get("client") or ("unknown", 0)
        if ":" not in host:
            return f"ipv4:{host}:{port}"
        return f"ipv6:{quote(f'[{host}]', safe=':')}:{port}"

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        """Of a trace, that the request belongs to."""
        found = ((name, self.header(name.encode())) for name in ("traceparent", "tracestate"))
        return [(name, value) for name, value in found if value is not None]

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def done(self) -> None:
        """The call is over."""
        for callback in self._callbacks:
            callback(self)

    # --- the request ------------------------------------------------------------------------------

    def header(self, name: bytes) -> str | None:
        """By its name in lower case."""
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name), None)

    async def body(self, most: int) -> bytes:
        """All of it.

        Raises:
            BadBody: it has more than `most` bytes, or did not come in time.
        """
        too_large = BadBody(413, f"the body is too large: at most {most} bytes (max_message_bytes)")
        told = self.header(b"content-length") or ""
        if told.isdecimal() and (len(told) > 18 or int(told) > most):
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while self.unread:
                    parts.append(await self._part())
                    size += len(parts[-1])
                    if size > most:
                        raise too_large
        except TimeoutError:
            raise BadBody(408, f"the body did not come within {BODY_SECONDS:g} s") from None
        return b"".join(parts)

    async def discard(self) -> None:
        """Read what comes of the body within a moment: a connection that is closed before takes the answer away with it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while self.unread:
                    await self._part()

    async def _part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
            raise asyncio.CancelledError
        self.unread = message.get("more_body", False)
        return bytes(message.get("body", b""))

    async def watch(self, task: asyncio.Task[Any]) -> None:
        """After the body has come: cancel the task when the client goes before it has its answer."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._complete:
            self.gone = True
            task.cancel()

    # --- the answer -------------------------------------------------------------------------------

    async def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, kind: bytes = JSON) -> None:
        """The whole answer."""
        await self._start(status, {"content-length": str(len(body)), **(headers or {})}, kind)
        await self._write(body, more=False)

    async def start_events(self, headers: dict[str, str]) -> None:
        """An answer of server-sent events begins."""
        await self._start(200, {"cache-control": "no-store", **headers}, EVENTS)

    async def event(self, data: str) -> None:
        """Send one; waits while the client does not read."""
        await self._write(b"data: " + data.encode("utf-8", "replace") + b"\n\n", more=True)

    async def end_events(self) -> None:
        await self._write(b"data: [DONE]\n\n", more=False)

    async def _start(self, status: int, headers: dict[str, str], kind: bytes) -> None:
        self.status = status
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        message: Message = {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *raw]}
        await self._send(message)

    async def _write(self, body: bytes, more: bool) -> None:
        self._complete = not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def id_headers(request_id: str) -> dict[str, str]:
    """The request's id, where a header can hold it."""
    return {"x-request-id": request_id} if re.fullmatch(r"[!-~]{1,200}", request_id) else {}


def json_object(raw: bytes) -> dict[str, Any]:
    """A body's JSON.

    Raises:
        BadBody: it is no JSON object, or has too many parts.
    """
    if (containers := raw.count(b"[") + raw.count(b"{")) > MOST_CONTAINERS:
        raise BadBody(400, f"the body has {containers} arrays and objects; at most {MOST_CONTAINERS}")
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as wrong:
        raise BadBody(400, f"the body is no JSON: {wrong}") from None
    if not isinstance(value, dict):
        raise BadBody(400, "the body must be a JSON object")
    return value
