"""Whether an engine is paused or sleeps, and the requests that wait meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jengine.base.errors import InvalidArgument
from jengine.core.request import Request
from jengine.core.weights import PauseMode, Tag
from jengine.scheduling.requests.loras import Lora, LoraPlaces


class PromptAtGate(NamedTuple):
    """A prompt's requests that wait, and their adapter, which they keep even if it is unloaded."""

    requests: list[Request]
    lora: Lora | None


class Gate:
    """
    Args:
        loras: loaded ones, to note those that requests wait with.

    Attributes:
        mode: how the engine was paused; None: it is not.
        asleep: what sleep has freed.
        by_sleep: whether sleep has paused it, so that it goes on as soon as it can.
    """

    def __init__(self, loras: LoraPlaces) -> None:
        self._loras = loras
        self.mode: PauseMode | None = None
        self.asleep: set[Tag] = set()
        self.by_sleep = False
        self._held: dict[str, PromptAtGate] = {}  # by id; a prompt's requests are held together

    @property
    def plans(self) -> bool:
        """Whether steps are planned: always, or for requests that came before the pause."""
        return self.mode in (None, "wait")

    @property
    def held(self) -> int:
        """Number of requests that wait here."""
        return len(self._held)

    def hold(self, requests: tuple[Request, ...], lora: Lora | None) -> None:
        """Keeps a prompt's requests until the engine resumes.

        Raises:
            InvalidArgument: an id is in use.
        """
        for request in requests:
            if request.request_id in self._held:
                limit = "a request with this id is not finished yet"
                raise InvalidArgument("request_id", request.request_id, limit)
        together = PromptAtGate([*requests], lora)
        for request in requests:
            self._held[request.request_id] = together
            self._loras.came(lora)

    def drop(self, request_id: str) -> bool:
        """Forgets a request. Returns False if it does not wait here."""
        together = self._held.pop(request_id, None)
        if together is None:
            return False
        together.requests[:] = [each for each in together.requests if each.request_id != request_id]
        self._loras.ended(together.lora)
        return True

    def open(
        self,
        queue: Callable[[list[Request], Lora | None], object],
        fail: Callable[[list[Request], Exception], None],
    ) -> None:
        """Ends the pause, and queues the requests that waited, prompt by prompt. `fail` gets those that
        cannot be queued.
        """
        self.mode, self.by_sleep = None, False
        held, self._held = self._held, {}
        for together in {id(prompt): prompt for prompt in held.values()}.values():
            try:
                queue(*together)
            except Exception as error:
                fail(together.requests, error)
            for _ in together.requests:
                self._loras.ended(together.lora)
