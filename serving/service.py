"""What both services answer requests with."""

from __future__ import annotations

from typing import NamedTuple

from jengine.serving.admission import Admission
from jengine.serving.bounds import RequestBounds
from jengine.serving.model_provider import ModelProvider
from jengine.serving.sandbox import Sandbox
from jengine.serving.text_work import TextWork
from jengine.serving.tracking import RequestTracker


class Shared(NamedTuple):
    """A server's parts.

    Attributes:
        sandbox: where grammars are checked, and clients' chat templates rendered.
        text_work: where long texts are tokenized.
        write_timeout: seconds in which a client must take each message of a stream.
    """

    models: ModelProvider
    admission: Admission
    tracker: RequestTracker
    bounds: RequestBounds
    sandbox: Sandbox
    text_work: TextWork
    write_timeout: float


class Service:
    """A service's base. Every method may reject a request with the statuses of jengine.serving.errors."""

    def __init__(self, shared: Shared) -> None:
        self._models, self._admission, self._tracker, self._bounds, self._sandbox, self._text_work, self._write_timeout = shared
