"""Earlier responses: the store that keeps them, requests that name them, and their own paths."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import grpc
import msgspec

from jengine import InvalidArgument
from jengine.serving.calls.errors import Refusal
from jengine.serving.guards.admission import client_of
from jengine.serving.guards.security import current_key
from jengine.serving.http.calls import BadBody, HttpCall
from jengine.serving.http.turns import type_of
from jengine.serving.requests.service import TextWork

MAX_RESPONSES = 10_000
MAX_SECONDS = 6 * 3600.0  # since the last use
PREVIOUS = "previous_response_id"
Item = dict[str, Any]


class StoredResponse(NamedTuple):
    """A response.

    Attributes:
        id: as in the answer.
        answer: the response as JSON.
        input: the items before its output, as a JSON array.
        items: ids of the items of its output.
        used: when it was last used, in seconds.
    """

    id: str
    answer: bytes
    input: bytes
    items: tuple[str, ...]
    used: float = 0.0

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.answer) + len(self.input)


class _Shelf:
    """The responses of one API key, the last used last."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.items: dict[str, str] = {}  # ids of items of output, to ids of responses
        self.size = 0

    def add(self, response: StoredResponse) -> None:
        self.responses[response.id] = response
        self.items.update(dict.fromkeys(response.items, response.id))
        self.size += response.size

    def remove(self, response_id: str) -> StoredResponse:
        response = self.responses.pop(response_id)
        for name in response.items:
            self.items.pop(name, None)
        self.size -= response.size
        return response

    def remove_oldest(self) -> None:
        self.remove(next(iter(self.responses)))


class ResponseStore:
    """Keeps the responses that were used last, for each API key apart. If there is no room, the key with the
    most bytes loses its oldest response. Belongs to one event loop.

    Args:
        max_bytes: of all responses; 0 keeps none.
        clock: returns seconds.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._shelves: dict[str | None, _Shelf] = {}

    @property
    def on(self) -> bool:
        """Whether it keeps any."""
        return self._max_bytes > 0

    def put(self, response: StoredResponse) -> None:
        """Keeps a response of the current key, if there is room for it at all."""
        if response.size > self._max_bytes:
            return
        shelf = self._shelves.setdefault(self._key(), _Shelf())
        if response.id in shelf.responses:
            shelf.remove(response.id)
        shelf.add(response._replace(used=self._clock()))
        self._trim()

    def get(self, response_id: str) -> StoredResponse | None:
        """A response of the current key."""
        self._trim()
        shelf = self._shelves.get(self._key())
        if shelf is None or response_id not in shelf.responses:
            return None
        response = shelf.remove(response_id)._replace(used=self._clock())
        shelf.add(response)
        return response

    def with_item(self, item_id: str) -> StoredResponse | None:
        """The response of the current key whose output has this item."""
        shelf = self._shelves.get(self._key())
        response_id = None if shelf is None else shelf.items.get(item_id)
        return None if response_id is None else self.get(response_id)

    def remove(self, response_id: str) -> bool:
        """Forgets a response of the current key. Returns whether there was one."""
        if self.get(response_id) is None:
            return False
        self._shelves[self._key()].remove(response_id)
        return True

    def _key(self) -> str | None:
        key = current_key.get()
        return None if key is None else key.name

    def _trim(self) -> None:
        oldest = self._clock() - MAX_SECONDS
        for shelf in self._shelves.values():
            while shelf.responses and next(iter(shelf.responses.values())).used < oldest:
                shelf.remove_oldest()
        while (
            sum(shelf.size for shelf in self._shelves.values()) > self._max_bytes
            or sum(len(shelf.responses) for shelf in self._shelves.values()) > MAX_RESPONSES
        ):
            max(self._shelves.values(), key=lambda shelf: shelf.size).remove_oldest()


class EarlierResponses:
    """Handlers of requests for earlier responses.

    Args:
        max_bytes: the largest request, with the items to which it refers.
    """

    def __init__(self, store: ResponseStore, text_work: TextWork, max_bytes: int) -> None:
        self._store, self._text_work, self._max_bytes = store, text_work, max_bytes

    async def expand(self, call: HttpCall, body: dict[str, Any]) -> dict[str, Any]:
        """A request with the items to which it refers."""
        previous, items = body.get(PREVIOUS), body.get("input")
        before = self._earlier(previous) if isinstance(previous, str) else None
        named: dict[str, bytes] = {}
        for item in items if isinstance(items, list) else ():
            if (item_id := _reference(item)) is not None:
                named[item_id] = self._with_item(item_id)
        if before is None and not named:
            return body
        call.size += sum(map(len, {id(text): text for text in named.values()}.values()))
        call.size += 0 if before is None else before.size
        if call.size > self._max_bytes:
            limit = f"with its earlier items, the request has {call.size} bytes: at most {self._max_bytes}"
            raise BadBody(413, f"{limit} (max_message_bytes)")

        def whole() -> dict[str, Any]:
            return {**body, "input": [*_items_of(before), *_resolved(items, named)]}

        return await self._text_work.run(client_of(call), call.size, whole)

    def _earlier(self, response_id: str) -> StoredResponse:
        """Raises Refusal, as OpenAI's API does."""
        if (response := self._store.get(response_id)) is not None:
            return response
        why = f"Previous response with id {response_id!r} not found."
        if not self._store.on:
            why += " This server keeps no responses: send the earlier items in input, with store=false."
        resource = PREVIOUS, response_id
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, why, resource=resource)

    def _with_item(self, item_id: str) -> bytes:
        if (response := self._store.with_item(item_id)) is not None:
            return response.answer
        why = (
            f"Item with id {item_id!r} not found. This server keeps no items with store=false, and forgets"
            " old ones: send the item itself in input, with store=false."
        )
        raise Refusal(grpc.StatusCode.NOT_FOUND, why, resource=("item", item_id))

    # --- the paths of a response -------------------------------------------------------------------

    async def retrieve(self, call: HttpCall) -> None:
        query = dict(parse_qsl(call.scope["query_string"].decode("latin-1")))
        if query.get("stream") == "true":
            raise InvalidArgument("stream", True, "only POST /v1/responses streams")
        await call.answer(200, self._response(call).answer)

    async def delete(self, call: HttpCall) -> None:
        response = self._response(call)
        self._store.remove(response.id)
        deleted = {"id": response.id, "object": "response", "deleted": True}
        await call.answer(200, msgspec.json.encode(deleted))

    def _response(self, call: HttpCall) -> StoredResponse:
        """Raises Refusal: there is none with this id."""
        response_id = call.scope["path_params"]["id"]
        if (response := self._store.get(response_id)) is not None:
            return response
        why = f"Response with id {response_id!r} not found."
        if not self._store.on:
            why += " This server keeps no responses."
        raise Refusal(grpc.StatusCode.NOT_FOUND, why, resource=("response", response_id))


async def no_compaction(call: HttpCall) -> None:
    why = "this server compacts no conversations: ask the model for a summary with POST /v1/responses"
    raise Refusal(grpc.StatusCode.NOT_FOUND, why)


async def no_websocket(call: HttpCall) -> None:
    """426 lets clients that try a WebSocket first continue with POST at once."""
    if (call.header(b"upgrade") or "").lower() == "websocket":
        raise BadBody(426, "this server has no WebSocket: use POST /v1/responses, with stream=true")
    raise BadBody(405, "use POST /v1/responses")


# --- items ----------------------------------------------------------------------------------------


def _reference(item: Any) -> str | None:
    """The id of the item to which an item refers; None if it is no reference. Its type may be missing."""
    alone = isinstance(item, dict) and item.keys() - {"type"} == {"id"} and item.get("type") is None
    name = item.get("id") if alone or type_of(item) == "item_reference" else None
    return name if isinstance(name, str) else None


def _items_of(response: StoredResponse | None) -> list[Item]:
    """The input and the output of a response."""
    if response is None:
        return []
    return [*msgspec.json.decode(response.input), *msgspec.json.decode(response.answer)["output"]]


def _resolved(items: Any, named: dict[str, bytes]) -> list[Any]:
    """Items with those that they refer to. `named`: by id, the responses that have them as JSON."""
    if items is None:
        return []
    if not isinstance(items, list):
        return [{"role": "user", "content": items}]
    outputs = {text: msgspec.json.decode(text)["output"] for text in {*named.values()}}
    by_id = {item["id"]: item for output in outputs.values() for item in output}
    return [by_id.get(_reference(item), item) if named else item for item in items]
