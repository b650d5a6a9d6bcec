"""Counting at the door: whatever comes and goes in whatever order, never more than may, and in the end nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from google.rpc.error_details_pb2 import RetryInfo
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jengine import InvalidArgument
from serving.admission import LONGEST_RETRY, SHORTEST_RETRY, Admission, Place, client_of
from serving.config import ServerConfig
from serving.errors import Refusal
from serving.mock_engine import MockEngine
from serving.model_provider import FixedModel, ModelInfo
from serving.security import key_name

RUNNING, WAITING, PER_CLIENT = 3, 4, 2


@dataclass
class Context:
    """What Admission asks of gRPC's context."""

    address: str
    callbacks: list[Callable[[Any], None]] = field(default_factory=list)

    def peer(self) -> str:
        return self.address

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)


def admission() -> Admission:
    info = ModelInfo(name="m", limits=MockEngine(max_num_seqs=RUNNING).limits, dtype="x")
    config = ServerConfig(max_waiting=WAITING, max_streams_per_client=PER_CLIENT)
    return Admission(config, FixedModel(None, info))  # type: ignore[arg-type]


class Door(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.admission = admission()
        self.streams: list[Context] = []
        self.places: list[tuple[Place, int]] = []

    @rule(client=st.integers(0, 2), port=st.integers(1, 9))
    def come(self, client: int, port: int) -> None:
        context = Context(f"ipv4:10.0.0.{client}:{port}")
        mine = sum(client_of(other) == client_of(context) for other in self.streams)  # type: ignore[arg-type]
        try:
            self.admission.stream(context)  # type: ignore[arg-type]
            self.streams.append(context)
            assert mine < PER_CLIENT
        except Refusal as refused:
            assert mine == PER_CLIENT
            check_retry(refused)

    @rule(which=st.integers(0, 100))
    def go(self, which: int) -> None:
        if self.streams:
            context = self.streams.pop(which % len(self.streams))
            for callback in context.callbacks:
                callback(context)

    @rule(n=st.integers(1, RUNNING + WAITING + 2))
    def sit(self, n: int) -> None:
        taken = self.admission.taken
        try:
            self.places.append((self.admission.place(n), n))
            assert taken + n <= RUNNING + WAITING
        except InvalidArgument as wrong:
            assert wrong.field == "n" and n > RUNNING + WAITING
        except Refusal as refused:
            assert taken + n > RUNNING + WAITING >= n
            check_retry(refused)

    @rule(which=st.integers(0, 100), times=st.integers(1, 3))
    def rise(self, which: int, times: int) -> None:
        if self.places:
            place, _ = self.places.pop(which % len(self.places))
            with place:
                for _ in range(times - 1):
                    place.release()

    @invariant()
    def counts(self) -> None:
        assert self.admission.taken == sum(n for _, n in self.places)
        assert sum(self.admission._streams.values()) == len(self.streams)
        assert 0 not in self.admission._streams.values(), "clients that have gone are forgotten"


def check_retry(refused: Refusal) -> None:
    [info] = refused.details
    assert isinstance(info, RetryInfo)
    assert SHORTEST_RETRY - 1e-6 <= info.retry_delay.ToNanoseconds() / 1e9 <= LONGEST_RETRY


TestDoor = Door.TestCase


def test_a_client_is_its_key_or_its_address() -> None:
    here = Context("ipv6:%5B::1%5D:5000")
    assert client_of(here) == client_of(Context("ipv6:%5B::1%5D:5001")) == "ipv6:%5B::1%5D"  # type: ignore[arg-type]
    token = key_name.set("alice")
    try:
        assert client_of(here) == client_of(Context("ipv4:10.0.0.1:7")) == "key alice"  # type: ignore[arg-type]
    finally:
        key_name.reset(token)


def test_the_fuller_the_later(monkeypatch: pytest.MonkeyPatch) -> None:
    door, clock = admission(), [0.0]
    monkeypatch.setattr("serving.admission.time.monotonic", lambda: clock[0])
    for _ in range(50):  # it learns that a completion takes six seconds
        place = door.place(1)
        clock[0] += 6.0
        place.release()
    places = [door.place(1) for _ in range(RUNNING + WAITING)]
    with pytest.raises(Refusal) as refused:
        door.place(1)
    [info] = refused.value.details
    assert 3.5 < info.retry_delay.ToNanoseconds() / 1e9 < 4.5, "half of four, three at a time, each six seconds"
    for place in places:
        place.release()
