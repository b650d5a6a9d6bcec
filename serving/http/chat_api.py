"""What an API for conversations tells ChatService: how it asks, and how it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from jengine import RequestOutput
from jengine.serving.calls.portions import Portioned
from jengine.serving.http.bodies import Body
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.chat_request import Chat
from jengine.serving.http.parts import Parts
from jengine.serving.requests.endings import Aborts


class Asked(NamedTuple):
    """A body that has been read.

    Attributes:
        body: the same request in the fields of /v1/chat/completions.
        names: see HttpCall.
        own: the fields in the API's own form.
    """

    body: Body
    names: dict[str, str]
    own: Mapping[str, Any]


class AnswerStream(Protocol):
    """Sends an answer as events.

    Attributes:
        finished: whether the last output has been shown.
    """

    finished: bool

    async def start(self) -> None:
        """The request is queued."""

    async def show(self, output: RequestOutput) -> None:
        """Sends new output (of kind delta)."""

    async def end(self) -> None:
        """Ends the events."""


class ChatApi(Protocol):
    """An API.

    Attributes:
        path: of its requests, for logs.
        aborts: those that its answers show.
    """

    path: str
    aborts: Aborts

    def read(self, given: dict[str, Any]) -> Asked:
        """Validates a body. Raises InvalidArgument, naming the field."""

    def headers(self, request_id: str) -> dict[str, str]:
        """Headers of an answer."""

    async def whole(self, chat: Chat, output: RequestOutput, request_id: str, portioned: Portioned) -> Parts:
        """A complete answer (of kind final)."""

    def stream(
        self, call: HttpCall, chat: Chat, output: RequestOutput, request_id: str, portioned: Portioned
    ) -> AnswerStream:
        """A streamed answer. `output` is that of a request that has just been queued."""

    async def begin_too_long(self, call: HttpCall, chat: Chat, request_id: str, portioned: Portioned) -> None:
        """The prompt of a streamed answer is too long: begins the stream if clients look for the error there,
        rather than for an HTTP status.
        """
