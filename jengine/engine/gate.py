"""Whether an engine plans steps, and the requests that wait until it does again."""

from __future__ import annotations

from jengine.base.errors import InvalidArgument
from jengine.core.request import Request
from jengine.core.weights import PauseMode, Tag


class Gate:
    """
    Attributes:
        mode: how the engine was paused; None: it is not.
        asleep: what sleep has freed.
        by_sleep: whether sleep has paused it, so that it goes on as soon as it can.
    """

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self.asleep: set[Tag] = set()
        self.by_sleep = False
        self._held: dict[str, list[Request]] = {}  # by id; a prompt's requests share a list

    @property
    def plans(self) -> bool:
        """Whether steps are planned: always, or for requests that came before the pause."""
        return self.mode in (None, "wait")

    @property
    def held(self) -> int:
        """Number of requests that wait here."""
        return len(self._held)

    def hold(self, requests: tuple[Request, ...]) -> None:
        """Keeps a prompt's requests until the engine resumes.

        Raises:
            InvalidArgument: an id is in use.
        """
        for request in requests:
            if request.request_id in self._held:
                limit = "a request with this id is not finished yet"
                raise InvalidArgument("request_id", request.request_id, limit)
        together = [*requests]
        self._held |= {request.request_id: together for request in requests}

    def drop(self, request_id: str) -> bool:
        """Forgets a request. Returns False if it does not wait here."""
        together = self._held.pop(request_id, None)
        if together is not None:
            together[:] = [request for request in together if request.request_id != request_id]
        return together is not None

    def open(self) -> list[list[Request]]:
        """Ends the pause. Returns the requests that waited, by prompt."""
        self.mode, self.by_sleep = None, False
        held, self._held = self._held, {}
        return [*{id(together): together for together in held.values()}.values()]
