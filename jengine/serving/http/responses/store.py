"""Responses that clients may refer to later, in memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from jengine.serving.guards.security import current_key

MAX_RESPONSES = 10_000
MAX_SECONDS = 6 * 3600.0  # since the last use


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
