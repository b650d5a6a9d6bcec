"""Places of LoRA adapters: a state machine over loading, unloading, requests and their ends."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jengine.base.errors import InvalidArgument
from jengine.scheduling.requests.adapters import EMPTY, Adapter, Adapters

NAMES = "abcdef"


class AdaptersMachine(RuleBasedStateMachine):
    """Requests wait in order; any of them that may start does, as the scheduler admits them."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = Adapters(2)
        self.waiting: list[Adapter] = []
        self.running: list[Adapter] = []
        self.written: dict[int, int] = {}  # by place
        self.dropped: set[int] = set()

    @rule(name=strategies.sampled_from(NAMES))
    def load(self, name: str) -> None:
        self.adapters.load(name, self.adapters.next_number())

    @precondition(lambda self: self.adapters.by_name)
    @rule(data=strategies.data())
    def unload(self, data: strategies.DataObject) -> None:
        self.adapters.unload(data.draw(strategies.sampled_from(sorted(self.adapters.by_name))))

    @precondition(lambda self: self.adapters.by_name)
    @rule(data=strategies.data())
    def come(self, data: strategies.DataObject) -> None:
        adapter = self.adapters.get(data.draw(strategies.sampled_from(sorted(self.adapters.by_name))))
        assert adapter is not None
        self.adapters.came(adapter)
        self.waiting.append(adapter)

    @rule()
    def admit(self) -> None:
        for adapter in [*self.waiting]:
            if self.adapters.may_start(adapter):
                self.waiting.remove(adapter)
                self.adapters.start(adapter)
                self.running.append(adapter)
        for number, place in self.adapters.take_writes():
            assert number not in self.dropped
            self.written[place] = number
        there = {*self.adapters, *self.running, *self.waiting}  # also unloaded ones that are in use
        held = {adapter.place: adapter.number for adapter in there if adapter.place}
        for place, number in self.written.items():
            assert number == held.get(place, EMPTY), "a place has numbers of an adapter that is gone"

    @precondition(lambda self: self.running)
    @rule(data=strategies.data(), preempted=strategies.booleans())
    def stop(self, data: strategies.DataObject, preempted: bool) -> None:
        adapter = self.running.pop(data.draw(strategies.integers(0, len(self.running) - 1)))
        self.adapters.stop(adapter)
        if preempted:
            self.waiting.append(adapter)
        else:
            self.adapters.ended(adapter)

    @precondition(lambda self: self.waiting)
    @rule(data=strategies.data())
    def abort(self, data: strategies.DataObject) -> None:
        self.adapters.ended(self.waiting.pop(data.draw(strategies.integers(0, len(self.waiting) - 1))))

    @invariant()
    def places_hold_what_runs(self) -> None:
        self.adapters.check_integrity()
        self.dropped |= {*self.adapters.dropped}
        for adapter in self.running:
            assert self.written[adapter.place] == adapter.number
        for adapter in (*self.waiting, *self.running, *self.adapters):
            assert adapter.number not in self.dropped
        assert self.adapters.highest == max((one.place for one in self.running), default=0)

    @invariant()
    def names_in_use_are_those_of_the_requests(self) -> None:
        running, waiting = (tuple(sorted({one.name for one in of})) for of in (self.running, self.waiting))
        assert self.adapters.in_use == (running, waiting)

    def teardown(self) -> None:
        """Once running requests end, all that wait run, in rounds."""
        for _ in range(len(self.waiting) + 1):
            while self.running:
                adapter = self.running.pop()
                self.adapters.stop(adapter)
                self.adapters.ended(adapter)
            self.admit()
        assert not self.waiting
        super().teardown()


AdaptersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAdapters = AdaptersMachine.TestCase


def test_a_waiting_adapter_gets_a_place_although_others_keep_coming() -> None:
    adapters = Adapters(1)
    for name in "ab":
        adapters.load(name, adapters.next_number())
    a, b = adapters.get("a"), adapters.get("b")
    assert a is not None and b is not None
    for adapter in (a, a, b):
        adapters.came(adapter)
    assert adapters.may_start(a)
    adapters.start(a)
    assert not adapters.may_start(b)
    assert not adapters.may_start(a), "it leaves for the one that waits"
    adapters.stop(a)
    adapters.ended(a)
    assert adapters.may_start(b)
    adapters.start(b)
    assert (b.place, a.place) == (1, 0)
    assert adapters.take_writes() == [(b.number, 1)]


def test_a_place_is_emptied_when_its_adapter_goes() -> None:
    """Once its last request has ended; not if another adapter has the place by then."""
    adapters = Adapters(2)
    a = adapters.load("a", adapters.next_number())
    adapters.came(a)
    adapters.start(a)
    assert adapters.take_writes() == [(a.number, 1)]
    adapters.unload("a")
    assert adapters.take_writes() == []
    adapters.stop(a)
    adapters.ended(a)
    b = adapters.load("b", adapters.next_number())
    assert adapters.take_writes() == [(EMPTY, 1)]
    for adapter in (b, adapters.load("c", adapters.next_number())):
        adapters.came(adapter)
        adapters.start(adapter)
        adapters.stop(adapter)
        adapters.ended(adapter)
    adapters.unload("c")
    d = adapters.load("d", adapters.next_number())
    adapters.came(d)
    adapters.start(d)
    assert adapters.take_writes() == [(b.number, 1), (d.number, 2)]


def test_names() -> None:
    adapters = Adapters(1)
    with pytest.raises(InvalidArgument, match="lora_request='x': no adapter of this name is loaded"):
        adapters.get("x")
    assert adapters.get(None) is None and adapters.may_start(None)
