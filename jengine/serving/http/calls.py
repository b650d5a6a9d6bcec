"""One HTTP request and its response."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
from starlette.types import Message, Receive, Scope, Send

from jengine import InvalidArgument

BODY_SECONDS = 60.0  # maximum time for a request's body to arrive
DISCARD_SECONDS = 1.0  # maximum time to read an unwanted body
CHUNK = 2**18  # bytes of a response that are sent at once
MOST_CONTAINERS = 2**17  # maximum arrays and objects in a body; each takes at least a hundred bytes

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"


class BadBody(Exception):
    """A request body that cannot be used. `status`: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpCall:
    """A jengine.serving.calls.call.Call.

    Attributes:
        status: status of the response; 0 before it.
        unread: whether part of the body has not been read.
        size: bytes of the body, and of what it refers to, once they have been read.
        names: for fields that have other names in this request's body, a map from jengine's names.
        events: number of events sent.
        gone: whether the client disconnected before the end of the response.
        more_headers: returns further headers of the response when it begins.
        end_failed: ends a response that has begun, with an error, if its API does not do that as usual.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.status, self.gone, self._complete = 0, False, False
        self.unread, self.size, self.events = True, 0, 0
        self.names: dict[str, str] = {}
        self.more_headers: Callable[[], dict[str, str]] = dict
        self.end_failed: Callable[[Any], Awaitable[None]] | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._event = asyncio.Lock()

    # --- interface Call-----------------------------------------------------------------------------

    def peer(self) -> str:
        host, port = self.scope.get("client") or ("unknown", 0)
        if ":" not in host:
            return f"ipv4:{host}:{port}"
        return f"ipv6:{quote(f'[{host}]', safe=':')}:{port}"

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        """Headers of the trace to which the request belongs."""
        headers = ((name, self.header(name.encode())) for name in ("traceparent", "tracestate"))
        return [(name, value) for name, value in headers if value is not None]

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def done(self) -> None:
        """Called when the call has ended."""
        for callback in self._callbacks:
            callback(self)

    # --- the request ------------------------------------------------------------------------------

    def header(self, name: bytes) -> str | None:
        """A header by its name in lower case."""
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name), None)

    async def body(self, max_bytes: int) -> bytes:
        """Reads the whole body.

        Raises:
            BadBody: it has more than `max_bytes` bytes, or did not arrive in time.
        """
        too_large = BadBody(413, f"the body is too large: at most {max_bytes} bytes (max_message_bytes)")
        length = self.header(b"content-length") or ""
        if length.isdecimal() and (len(length) > 18 or int(length) > max_bytes):
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while self.unread:
                    parts.append(await self._part())
                    size += len(parts[-1])
                    if size > max_bytes:
                        raise too_large
        except TimeoutError:
            raise BadBody(408, f"the body did not come within {BODY_SECONDS:g} s") from None
        return b"".join(parts)

    async def discard(self) -> None:
        """Reads and drops the rest of the body for a moment, since closing the connection too early would
        lose the response.
        """
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
        """After the body: cancels the task if the client disconnects before it has its response."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._complete:
            self.gone = True
            task.cancel()

    # --- the answer -------------------------------------------------------------------------------

    async def answer(
        self,
        status: int,
        body: bytes | list[bytes],
        headers: dict[str, str] | None = None,
        kind: bytes = JSON,
    ) -> None:
        """Sends a whole response. A body in parts is sent in chunks, as the client reads them."""
        chunks = [body] if isinstance(body, bytes) else chunks_of(body)
        await self._start(status, {"content-length": str(sum(map(len, chunks))), **(headers or {})}, kind)
        for chunk in chunks[:-1]:
            await self._write(chunk, more=True)
        await self._write(chunks[-1], more=False)

    async def start_events(self, headers: dict[str, str]) -> None:
        """Begins a response of server-sent events."""
        await self._start(200, {"cache-control": "no-store", **headers}, EVENTS)

    async def event(self, data: list[bytes], name: str = "") -> None:
        """Sends an event, with a name if it has one; waits while the client does not read."""
        head = [b"event: %s\ndata: " % name.encode()] if name else [b"data: "]
        async with self._event:  # an event of several chunks is not interleaved with others
            self.events += 1
            for chunk in chunks_of([*head, *data, b"\n\n"]):
                await self._write(chunk, more=True)

    async def end_events(self, done: bytes = b"data: [DONE]\n\n") -> None:
        """Ends the events, with these last bytes."""
        await self._write(done, more=False)

    async def _start(self, status: int, headers: dict[str, str], kind: bytes) -> None:
        self.status = status
        raw = [(name.encode(), value.encode()) for name, value in (headers | self.more_headers()).items()]
        message: Message = {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", kind), *raw],
        }
        await self._send(message)

    async def _write(self, body: bytes, more: bool) -> None:
        self._complete = not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def chunks_of(parts: list[bytes]) -> list[bytes]:
    """Joins short parts, to chunks of about CHUNK bytes."""
    chunks: list[bytes] = []
    held: list[bytes] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= CHUNK:
            chunks.append(b"".join(held))
            held, size = [], 0
    return [*chunks, b"".join(held)] if held or not chunks else chunks


def id_headers(request_id: str) -> dict[str, str]:
    """A header with the request's id, if headers can represent it."""
    return {"x-request-id": request_id} if re.fullmatch(r"[!-~]{1,200}", request_id) else {}


def json_object(raw: bytes, most_bytes: Callable[[str], int | None] = lambda name: None) -> dict[str, Any]:
    """Parses a body's JSON. The sizes of its fields are checked before they are parsed.

    Args:
        most_bytes: the largest value of a field, as JSON; None: no limit.

    Raises:
        BadBody: it is not a JSON object, or has too many parts.
        InvalidArgument: a field is too large.
    """
    if (containers := _containers(raw)) > MOST_CONTAINERS:
        raise BadBody(400, f"the body has {containers} arrays and objects; at most {MOST_CONTAINERS}")
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        fields = _FIELDS.decode(raw)
        for name, value in fields.items():
            if (limit := most_bytes(name)) is not None and (size := len(memoryview(value))) > limit:
                raise InvalidArgument(name, f"{size} bytes", f"at most {limit} bytes of JSON")
        return {name: _value(name, value) for name, value in fields.items()}
    except InvalidArgument:
        raise
    except msgspec.ValidationError:
        raise BadBody(400, "the body must be a JSON object") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as wrong:
        raise BadBody(400, f"the body is not valid JSON: {wrong}") from None


def _containers(raw: bytes) -> int:
    """Number of arrays and objects. Within the limit, brackets in strings are counted, too."""
    count = raw.count(b"[") + raw.count(b"{")
    if count <= MOST_CONTAINERS:
        return count
    count, inside = 0, False  # without those in strings
    rest = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    for start in range(0, len(rest), 2**20):  # in pieces, to need little memory
        piece = rest[start : start + 2**20]
        strings = np.logical_xor.accumulate(piece == ord('"')) ^ inside
        count += int(np.count_nonzero(((piece | 32) == ord("{")) & ~strings))  # "[" | 32 is "{"
        inside = bool(strings[-1])
    return count


def _value(name: str, raw: msgspec.Raw) -> Any:
    """A field's value. Raises InvalidArgument for a number that is too large, such as 1e999."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError as wrong:
        raise InvalidArgument(name, "JSON", str(wrong)) from None
