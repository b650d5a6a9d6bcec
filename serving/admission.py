"""Admission control: bounds what waits, in all and for each client. Belongs to one event loop; never blocks."""

from __future__ import annotations

import time
from collections import Counter

import grpc

from jengine import InvalidArgument, SamplingParams
from serving.config import ServerConfig
from serving.errors import busy
from serving.model_provider import ModelProvider
from serving.security import key_name

SHORTEST_RETRY, LONGEST_RETRY = 0.1, 30.0  # seconds
# Stop strings become an automaton, bad words masks: that takes time and memory by their length, and others wait.
MOST_TEXTS, LONGEST_TEXTS = 256, 10_000  # texts, their characters together


class Admission:
    """Counts the completions that run or wait, and each client's streams.

    Attributes:
        taken: completions that run or wait.
    """

    def __init__(self, config: ServerConfig, models: ModelProvider) -> None:
        self._models, self._waiting, self._per_client = models, config.max_waiting, config.max_streams_per_client
        self.taken = 0
        self._streams: Counter[str] = Counter()  # by client
        self._seconds = SHORTEST_RETRY  # that a completion takes, of late

    @property
    def _running(self) -> int:
        return self._models.info.limits.max_num_seqs

    def stream(self, context: grpc.aio.ServicerContext) -> None:
        """Count one more stream of this client until it is over, which is when its last message has gone.

        Raises:
            Refusal: it has too many.
        """
        client = client_of(context)
        if self._streams[client] >= self._per_client:
            raise busy(f"this client has {self._per_client} streams; it may have no more at once", self._retry_seconds())
        self._streams[client] += 1
        context.add_done_callback(lambda _: self._over(client))

    def place(self, n: int) -> Place:
        """Places for a prompt's completions.

        Raises:
            Refusal: too many wait already.
            InvalidArgument: there will never be as many.
        """
        places = self._running + self._waiting
        if n > places:
            raise InvalidArgument("n", n, f"at most {places}, since {self._running} run and {self._waiting} wait at once")
        if self.taken + n > places:
            raise busy(f"{self._waiting} requests are waiting; the queue is full", self._retry_seconds())
        self.taken += n
        return Place(self, n)

    def leave(self, n: int, seconds: float) -> None:
        """Completions have ended that took this long."""
        self.taken -= n
        self._seconds += 0.1 * (seconds - self._seconds)

    def _over(self, client: str) -> None:
        self._streams[client] -= 1
        if not self._streams[client]:
            del self._streams[client]

    def _retry_seconds(self) -> float:
        """In which the half of what waits will have begun, so that not all who were refused find the queue full again."""
        rounds = max(self.taken - self._running, 0) / self._running
        return min(max(self._seconds * rounds / 2, SHORTEST_RETRY), LONGEST_RETRY)


class Place:
    """What `Admission.place` gives; to be released, once or more often."""

    def __init__(self, admission: Admission, n: int) -> None:
        self._admission, self._n, self._since = admission, n, time.monotonic()

    def release(self) -> None:
        if self._n:
            n, self._n = self._n, 0
            self._admission.leave(n, time.monotonic() - self._since)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def check_texts(params: SamplingParams) -> None:
    """Raises InvalidArgument where texts among the parameters would hold up everybody else."""
    for name in ("stop", "bad_words"):
        texts = getattr(params, name)
        if len(texts) > MOST_TEXTS or sum(map(len, texts)) > LONGEST_TEXTS:
            raise InvalidArgument(name, f"{len(texts)} texts", f"at most {MOST_TEXTS}, of {LONGEST_TEXTS} characters together")


def client_of(context: grpc.aio.ServicerContext) -> str:
    """The name of the client's key, or else its address without the port."""
    name = key_name.get()
    return f"key {name}" if name is not None else str(context.peer()).rpartition(":")[0]
