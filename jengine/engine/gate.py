"""Whether an engine plans steps, and the requests that wait until it does again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jengine.base.errors import InvalidArgument
from jengine.core.request import Request
from jengine.core.weights import PauseMode, Tag
from jengine.scheduling.requests.adapters import Adapter, Adapters


class Held(NamedTuple):
    """A prompt's requests that wait, and their adapter, which they keep even if it is unloaded."""

    requests: list[Request]
    adapter: Adapter | None


class Gate:
    """
    Args:
        adapters: loaded ones, to note those that requests wait with.

    Attributes:
        mode: how the engine was paused; None: it is not.
        asleep: what sleep has freed.
        by_sleep: whether sleep has paused it, so that it goes on as soon as it can.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self.mode: PauseMode | None = None
        self.asleep: set[Tag] = set()
        self.by_sleep = False
        self._held: dict[str, Held] = {}  # by id; a prompt's requests are held together

    @property
    def plans(self) -> bool:
        """Whether steps are planned: always, or for requests that came before the pause."""
        return self.mode in (None, "wait")

    @property
    def held(self) -> int:
        """Number of requests that wait here."""
        return len(self._held)

    def hold(self, requests: tuple[Request, ...], adapter: Adapter | None) -> None:
        """Keeps a prompt's requests until the engine resumes.

        Raises:
            InvalidArgument: an id is in use.
        """
        for request in requests:
            if request.request_id in self._held:
                limit = "a request with this id is not finished yet"
                raise InvalidArgument("request_id", request.request_id, limit)
        together = Held([*requests], adapter)
        for request in requests:
            self._held[request.request_id] = together
            self._adapters.came(adapter)

    def drop(self, request_id: str) -> bool:
        """Forgets a request. Returns False if it does not wait here."""
        together = self._held.pop(request_id, None)
        if together is None:
            return False
        together.requests[:] = [one for one in together.requests if one.request_id != request_id]
        self._adapters.ended(together.adapter)
        return True

    def open(
        self,
        queue: Callable[[list[Request], Adapter | None], object],
        fail: Callable[[list[Request], Exception], None],
    ) -> None:
        """Ends the pause, and queues the requests that waited, prompt by prompt. `fail` gets those that
        cannot be queued.
        """
        self.mode, self.by_sleep = None, False
        held, self._held = self._held, {}
        for together in {id(one): one for one in held.values()}.values():
            try:
                queue(*together)
            except Exception as error:
                fail(together.requests, error)
            for _ in together.requests:
                self._adapters.ended(together.adapter)
