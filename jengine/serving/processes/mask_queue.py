"""Creates the token masks of new requests in a thread of the engine's process, since a grammar may take
seconds to compile.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jengine import JengineError, SamplingParams, Tokenizer
from jengine.serving.processes.turns import Turns
from jengine.serving.processes.wire import Add, requests_of
from jengine.spi import Request, TokenMask

Made = list[Request] | tuple[list[str], Exception]


class MaskQueue:
    """Orders that wait for their masks. Clients take turns, by the time that their masks have taken.

    Args:
        tokenizer: returns the model's.
        made: called in the thread with the requests of an order, or with their ids and the error; only those
            that are still wanted.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer | None],
        made: Callable[[list[Request] | tuple[list[str], Exception]], None],
    ) -> None:
        self._tokenizer, self._made = tokenizer, made
        self._masks = SharedMasks()
        self._turns: Turns[_WaitingOrder] = Turns()
        self._waiting: dict[str, _WaitingOrder] = {}  # by request id, until the masks have been made
        self._changed = threading.Condition()  # protects these

    def start(self) -> None:
        threading.Thread(target=self._run, name="masks", daemon=True).start()

    def put(self, order: Add) -> None:
        with self._changed:
            waiting = _WaitingOrder(order)
            self._waiting.update(dict.fromkeys(waiting.wanted, waiting))
            self._turns.put(order.client, waiting)
            self._changed.notify()

    def end(self, request_id: str) -> bool:
        """Forgets a request. Returns False if it does not wait here. When all of a prompt's are forgotten,
        nothing is compiled.
        """
        with self._changed:
            waiting = self._waiting.pop(request_id, None)
            if waiting is None:
                return False
            waiting.wanted.discard(request_id)
            if not waiting.wanted:
                self._turns.remove(waiting.order.client, waiting)
            return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while (following := self._turns.take()) is None:
                    self._changed.wait()
            self.make(following[1])

    def make(self, waiting: _WaitingOrder) -> None:
        """Makes the masks of an order. Runs in the thread."""
        order, began = waiting.order, time.monotonic()
        requests, error = [], None
        try:
            requests = requests_of(order, self._tokenizer(), self._masks.of(order.client))
        except Exception as wrong:  # of one prompt; llguidance raises its own errors
            error = wrong
        with self._changed:
            self._turns.spend(order.client, time.monotonic() - began)
            for request_id in waiting.wanted:
                del self._waiting[request_id]
            if error is not None:
                self._made((list(waiting.wanted), error))
            else:  # with the lock, so that a request that is ended from now on is known to the engine
                self._made([request for request in requests if request.request_id in waiting.wanted])


class _WaitingOrder:
    """An order, and the ids of its requests that have not been ended."""

    def __init__(self, order: Add) -> None:
        self.order, self.wanted = order, {sample.request_id for sample in order.samples}


class SharedMasks:
    """Makes masks. Equal constraints of a client are compiled once, as long as one of its requests uses them.

    So the prompts of a request share what is compiled. Clients share nothing, since all copies of a grammar
    have one limit on their states, and fail together if one of them is too slow.
    """

    def __init__(self) -> None:
        self._origins: weakref.WeakValueDictionary[tuple[str, Any], _Origin] = weakref.WeakValueDictionary()

    def of(self, client: str) -> Callable[[SamplingParams, Tokenizer, int], Sequence[TokenMask | None]]:
        """jengine.make_masks for this client's requests."""

        def masks_of(params: SamplingParams, tokenizer: Tokenizer, count: int) -> Sequence[TokenMask | None]:
            key = client, repr((params.structured_outputs, params.bad_words, params.allowed_token_ids))
            origin = self._origins.get(key)
            if origin is None or origin.failed:
                origin = self._origins[key] = _Origin(params, tokenizer)
            return [_Copy(origin) for _ in range(count)]

        return masks_of


class _Origin:
    """A mask that is only copied.

    Attributes:
        failed: whether a copy has failed.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        from jengine.spi import make_masks  # imported here, since only structured outputs need llguidance

        [self.mask] = make_masks(params, tokenizer, 1)
        self.failed = False


class _Copy:
    """A TokenMask that keeps its origin alive."""

    def __init__(self, origin: _Origin) -> None:
        mask: Any = origin.mask
        self._origin, self._mask = origin, mask.copy()

    def fill(self, words: np.ndarray) -> None:
        try:
            self._mask.fill(words)
        except JengineError:
            self._origin.failed = True
            raise

    def accept(self, token: int) -> None:
        self._mask.accept(token)

    def rollback(self, count: int) -> None:
        self._mask.rollback(count)

    def forced(self) -> list[int]:
        tokens: list[int] = self._mask.forced()
        return tokens

    def free(self) -> int:
        return int(self._mask.free())

    def is_complete(self) -> bool:
        return bool(self._mask.is_complete())
