"""Counts of admission control: for any order of events, limits are never exceeded, and all counts return to
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jengine import InvalidArgument
from jengine.serving.calls.errors import Busy
from jengine.serving.calls.model_provider import FixedModel, ModelInfo
from jengine.serving.config import ServerConfig
from jengine.serving.guards.admission import LONGEST_RETRY, SHORTEST_RETRY, Place, ServerAdmission, client_of
from jengine.serving.guards.security import Key, current_key
from jengine.serving.metrics.server_metrics import Metrics
from tests.mocks.mock_engine import MockEngine

RUNNING, WAITING, PER_CLIENT = 3, 4, 5


@dataclass
class Context:
    """The part of gRPC's context that Admission uses."""

    address: str
    callbacks: list[Callable[[Any], None]] = field(default_factory=list)

    def peer(self) -> str:
        return self.address

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)


def of(client: int = 0, port: int = 1) -> Any:
    """A call of this client."""
    return Context(f"ipv4:10.0.0.{client}:{port}")


def admission(per_client: int = PER_CLIENT) -> ServerAdmission:
    info = ModelInfo(name="m", limits=MockEngine(max_num_seqs=RUNNING).limits, dtype="x")
    config = ServerConfig(max_waiting=WAITING, max_streams_per_client=per_client)
    return ServerAdmission(config, FixedModel(None, info), Metrics())  # type: ignore[arg-type]


class Door(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.admission = admission()
        self.streams: list[Context] = []
        self.places: list[tuple[Place, int, int]] = []  # of the admission: completions, client

    @rule(client=st.integers(0, 2), port=st.integers(1, 9))
    def come(self, client: int, port: int) -> None:
        context = of(client, port)
        mine = sum(client_of(other) == client_of(context) for other in self.streams)  # type: ignore[arg-type]
        try:
            self.admission.stream(context)  # type: ignore[arg-type]
            self.streams.append(context)
            assert mine < PER_CLIENT
        except Busy as refused:
            assert mine == PER_CLIENT
            check_retry(refused)

    @rule(which=st.integers(0, 100))
    def go(self, which: int) -> None:
        if self.streams:
            context = self.streams.pop(which % len(self.streams))
            for callback in context.callbacks:
                callback(context)

    @rule(client=st.integers(0, 2), n=st.integers(1, PER_CLIENT + 2))
    def sit(self, client: int, n: int) -> None:
        taken, mine = self.admission.taken, sum(n for _, n, whose in self.places if whose == client)
        try:
            self.places.append((self.admission.place(n, of(client)), n, client))
            assert taken + n <= RUNNING + WAITING and mine + n <= PER_CLIENT
        except InvalidArgument as wrong:
            assert wrong.field == "n" and n > PER_CLIENT
        except Busy as refused:
            assert taken + n > RUNNING + WAITING or mine + n > PER_CLIENT >= n
            check_retry(refused)

    @rule(which=st.integers(0, 100), times=st.integers(1, 3))
    def rise(self, which: int, times: int) -> None:
        if self.places:
            place, *_ = self.places.pop(which % len(self.places))
            with place:
                for _ in range(times - 1):
                    place.release()

    @invariant()
    def counts(self) -> None:
        assert (
            self.admission.taken
            == sum(n for _, n, _ in self.places)
            == sum(self.admission._completions.values())
        )
        assert 0 not in self.admission._completions.values()
        assert sum(self.admission._streams.values()) == len(self.streams)
        assert 0 not in self.admission._streams.values(), "clients that have gone are forgotten"


def check_retry(refused: Busy) -> None:
    assert SHORTEST_RETRY <= refused.retry_seconds <= LONGEST_RETRY


TestDoor = Door.TestCase


def test_a_client_is_its_key_or_its_address() -> None:
    here = Context("ipv6:%5B::1%5D:5000")
    assert client_of(here) == client_of(Context("ipv6:%5B::1%5D:5001")) == "ipv6:%5B::1%5D"  # type: ignore[arg-type]
    token = current_key.set(Key("alice"))
    try:
        assert client_of(here) == client_of(Context("ipv4:10.0.0.1:7")) == "key alice"  # type: ignore[arg-type]
    finally:
        current_key.reset(token)


def test_the_fuller_the_later(monkeypatch: pytest.MonkeyPatch) -> None:
    door, clock = admission(100), [0.0]
    monkeypatch.setattr("jengine.serving.guards.admission.time.monotonic", lambda: clock[0])
    for _ in range(50):  # it learns that a completion takes six seconds
        place = door.place(1, of())
        clock[0] += 6.0
        place.release()
    places = [door.place(1, of()) for _ in range(RUNNING + WAITING)]
    with pytest.raises(Busy) as refused:
        door.place(1, of())
    assert 3.5 < refused.value.retry_seconds < 4.5, "half of four, three at a time, each six seconds"
    for place in places:
        place.release()


@contextmanager
def calling_with(key: Key) -> Iterator[None]:
    token = current_key.set(key)
    try:
        yield
    finally:
        current_key.reset(token)


def test_n_never_fits_a_client() -> None:
    with pytest.raises(InvalidArgument, match=r"n=6: at most 5, .* client \(max_streams_per_client\)"):
        admission().place(6, of())


def test_a_key_has_a_limit_of_its_own() -> None:
    door = admission()
    with calling_with(Key("small", max_streams=1)):
        door.place(1, of())
        with pytest.raises(Busy, match="the maximum is 1") as refused:
            door.place(1, of(client=2))  # wherever it calls from
        assert refused.value.cause == "client_streams"
    with calling_with(Key("large", max_streams=6)):
        door.place(6, of())


def test_tokens_of_running_requests_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were charged as they came: requests that started together used a minute's tokens several times
    over.
    """
    door = admission()
    monkeypatch.setattr("jengine.serving.guards.admission.time.monotonic", lambda: 0.0)
    with calling_with(Key("anna", tokens_per_minute=60)):
        first, second, third = door.place(1, of()), door.place(2, of()), door.place(1, of())
        first.reserve(10, 40, first=True)
        second.reserve(5, 10, first=True)  # 10 tokens were left, so it may start, with both completions
        with pytest.raises(Busy, match="its running requests may use the rest") as refused:
            third.reserve(1, 1, first=True)
        assert (refused.value.cause, refused.value.retry_seconds) == ("tokens_per_minute", 16.0)
        with pytest.raises(Busy):
            door.place(1, of())
        second.reserve(0, 0, first=False)  # another prompt of a request that has started
        second.release()
        first.charge(50)  # what it has reserved: neither is counted twice
        third.reserve(1, 1, first=True)
        first.release()
        third.charge(1)
        third.release()
        with door.place(1, of()) as last:
            last.reserve(0, 8, first=True)
            last.charge(9)  # more than it has reserved
        with pytest.raises(Busy, match="has used them"):
            door.place(1, of())


def test_tokens_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    door, clock = admission(), [0.0]
    monkeypatch.setattr("jengine.serving.guards.admission.time.monotonic", lambda: clock[0])
    with calling_with(Key("anna", tokens_per_minute=60)):
        with door.place(1, of()) as place:
            place.charge(40)
            place.charge(40)  # so far
            place.charge(89)
        with pytest.raises(Busy, match="60 tokens a minute") as refused:
            door.place(1, of())
        assert (refused.value.cause, refused.value.retry_seconds) == ("tokens_per_minute", 30.0)
        clock[0] = 29.9
        with pytest.raises(Busy):
            door.place(1, of())
        clock[0] = 30.0
        door.place(1, of()).release()
    with calling_with(Key("berta", tokens_per_minute=60)):
        door.place(1, of()).release()  # others have their own
    with calling_with(Key("anna", tokens_per_minute=6)):  # after the keys were reloaded
        door.place(1, of()).charge(1)
        with pytest.raises(Busy, match="6 tokens a minute"):
            door.place(1, of())
    with calling_with(Key("anna")):
        door.place(1, of())
    assert not door._buckets.keys() & {"key anna"}
