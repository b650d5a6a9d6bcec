"""Places of LoRA adapters: a state machine over loading, unloading, requests and their ends."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jengine.base.errors import InvalidArgument
from jengine.core.request import Request, SamplingParams
from jengine.core.scheduling_options import SchedulingOptions
from jengine.scheduling.forecasts.expectations import hypothetical
from jengine.scheduling.requests.images import Images
from jengine.scheduling.requests.loras import EMPTY, Lora, LoraPlaces
from jengine.table.program_table import ProgramTable
from tests.schedulers import make_scheduler
from tests.scheduling.embedding_memory import FIRST, with_images
from tests.scheduling.strict_device import Loop
from tests.scheduling.test_promises import Linear
from tests.scheduling.virtual_loop import VirtualLoop

NAMES = "abcdef"


class AdaptersMachine(RuleBasedStateMachine):
    """Requests wait in order; any of them that may start does, as the scheduler admits them."""

    def __init__(self) -> None:
        super().__init__()
        self.loras = LoraPlaces(2)
        self.waiting: list[Lora] = []
        self.running: list[Lora] = []
        self.written: dict[int, int] = {}  # by place
        self.dropped: set[int] = set()

    @rule(name=strategies.sampled_from(NAMES))
    def load(self, name: str) -> None:
        self.loras.load(name, self.loras.next_number())

    @precondition(lambda self: self.loras.by_name)
    @rule(data=strategies.data())
    def unload(self, data: strategies.DataObject) -> None:
        self.loras.unload(data.draw(strategies.sampled_from(sorted(self.loras.by_name))))

    @precondition(lambda self: self.loras.by_name)
    @rule(data=strategies.data())
    def come(self, data: strategies.DataObject) -> None:
        lora = self.loras.get(data.draw(strategies.sampled_from(sorted(self.loras.by_name))))
        assert lora is not None
        self.loras.came(lora)
        self.waiting.append(lora)

    @rule()
    def admit(self) -> None:
        for lora in [*self.waiting]:
            if self.loras.may_start(lora):
                self.waiting.remove(lora)
                self.loras.start(lora)
                self.running.append(lora)
        for number, place in self.loras.take_writes():
            assert number not in self.dropped
            self.written[place] = number
        there = {*self.loras, *self.running, *self.waiting}  # also unloaded ones that are in use
        held = {lora.place: lora.number for lora in there if lora.place}
        for place, number in self.written.items():
            assert number == held.get(place, EMPTY), "a place has numbers of an adapter that is gone"

    @precondition(lambda self: self.running)
    @rule(data=strategies.data(), preempted=strategies.booleans())
    def stop(self, data: strategies.DataObject, preempted: bool) -> None:
        lora = self.running.pop(data.draw(strategies.integers(0, len(self.running) - 1)))
        self.loras.stop(lora)
        if preempted:
            self.waiting.append(lora)
        else:
            self.loras.ended(lora)

    @precondition(lambda self: self.waiting)
    @rule(data=strategies.data())
    def abort(self, data: strategies.DataObject) -> None:
        self.loras.ended(self.waiting.pop(data.draw(strategies.integers(0, len(self.waiting) - 1))))

    @invariant()
    def places_hold_what_runs(self) -> None:
        self.loras.check_integrity()
        self.dropped |= {*self.loras.dropped}
        for lora in self.running:
            assert self.written[lora.place] == lora.number
        for lora in (*self.waiting, *self.running, *self.loras):
            assert lora.number not in self.dropped
        assert self.loras.highest == max((one.place for one in self.running), default=0)

    @invariant()
    def names_in_use_are_those_of_the_requests(self) -> None:
        running, waiting = (tuple(sorted({one.name for one in of})) for of in (self.running, self.waiting))
        assert self.loras.in_use == (running, waiting)

    def teardown(self) -> None:
        """Once running requests end, all that wait run, in rounds."""
        for _ in range(len(self.waiting) + 1):
            while self.running:
                lora = self.running.pop()
                self.loras.stop(lora)
                self.loras.ended(lora)
            self.admit()
        assert not self.waiting
        super().teardown()


AdaptersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAdapters = AdaptersMachine.TestCase


def test_a_waiting_adapter_gets_a_place_although_others_keep_coming() -> None:
    loras = LoraPlaces(1)
    for name in "ab":
        loras.load(name, loras.next_number())
    a, b = loras.get("a"), loras.get("b")
    assert a is not None and b is not None
    for lora in (a, a, b):
        loras.came(lora)
    assert loras.may_start(a)
    loras.start(a)
    assert not loras.may_start(b)
    assert not loras.may_start(a), "it leaves for the one that waits"
    loras.stop(a)
    loras.ended(a)
    assert loras.may_start(b)
    loras.start(b)
    assert (b.place, a.place) == (1, 0)
    assert loras.take_writes() == [(b.number, 1)]


def test_a_place_is_emptied_when_its_adapter_goes() -> None:
    """Once its last request has ended; not if another adapter has the place by then."""
    loras = LoraPlaces(2)
    a = loras.load("a", loras.next_number())
    loras.came(a)
    loras.start(a)
    assert loras.take_writes() == [(a.number, 1)]
    loras.unload("a")
    assert loras.take_writes() == []
    loras.stop(a)
    loras.ended(a)
    b = loras.load("b", loras.next_number())
    assert loras.take_writes() == [(EMPTY, 1)]
    for lora in (b, loras.load("c", loras.next_number())):
        loras.came(lora)
        loras.start(lora)
        loras.stop(lora)
        loras.ended(lora)
    loras.unload("c")
    d = loras.load("d", loras.next_number())
    loras.came(d)
    loras.start(d)
    assert loras.take_writes() == [(b.number, 1), (d.number, 2)]


def test_names() -> None:
    loras = LoraPlaces(1)
    with pytest.raises(InvalidArgument, match="lora_request='x': no adapter of this name is loaded"):
        loras.get("x")
    assert loras.get(None) is None and loras.may_start(None)


@pytest.mark.parametrize("adapters, places", [(2, 1), (4, 2), (8, 4)])
def test_batches_stay_full_when_adapters_take_turns(adapters: int, places: int) -> None:
    """An adapter that leaves for another fills the slots that were free."""
    slots = 32
    table = ProgramTable.build(
        max_num_seqs=slots, max_num_batched_tokens=slots + 64, tile_size=8, adapters=places
    )
    costs = Linear(1.0, 0.0, 0.5, 0.0)
    costs.table = table
    engine = VirtualLoop(costs, 1, {})
    scheduler = make_scheduler(
        table,
        page_size=4,
        num_pages=2000,
        max_num_seqs=slots,
        max_num_batched_tokens=slots + 64,
        max_model_len=96,
        costs=costs,
        clock=engine.clock,
        max_loras=places,
        options=SchedulingOptions(),
    )
    loras = scheduler.registry.loras
    for number in range(adapters):
        loras.load(str(number), loras.next_number())
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for number in range(64):
        prompt, name = [100 + number, *range(1, 8)], str(number % adapters)
        engine.add(
            scheduler,
            Request(request_id=str(number), prompt_token_ids=prompt, params=params, lora_name=name),
        )
    running = []
    while scheduler.has_work:
        engine.step(scheduler)
        running.append(len(scheduler.registry.running))
    assert statistics.mean(running) > slots / 2


def loop(names: str, **options: Any) -> Loop:
    """With one place for these adapters."""
    defaults = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_loras": 1}
    made = Loop(tile_size=8, page_size=4, num_pages=400, **{**defaults, **options})
    for name in names:
        made.scheduler.registry.loras.load(name, made.scheduler.registry.loras.next_number())
    return made


def test_nothing_starts_in_place_of_accepted_requests_that_wait_for_an_adapter() -> None:
    """So those that run and those that are accepted are never more than may run."""
    one = loop("ab", strategy="latency")
    one.add([1] * 5, max_tokens=50, ignore_eos=True, targets={"lora_name": "a"})
    one.step(1)
    for number in range(16):
        one.add([number] * 5, max_tokens=4, targets={"lora_name": "b" if number < 7 else None})
    accepted = 0
    while one.scheduler.has_work:
        one.step(1)
        registry = one.scheduler.registry
        accepted = max(accepted, len(registry.running) + one.scheduler.acceptance.num_accepted)
    one.drain(1)
    assert accepted == 8


def test_an_adapter_keeps_its_place_if_that_for_which_it_leaves_waits_for_images() -> None:
    """Their rows are those of images that wait for the adapter that leaves."""
    one = loop("ab", images=Images(8, FIRST), max_num_seqs=1)
    one.add([1] * 4, max_tokens=10, ignore_eos=True, targets={"lora_name": "a"})
    one.step(1)
    text = one.add([1] * 4, max_tokens=3, targets={"lora_name": "b"})
    one.step(1)
    for name, rows in (("a", 6), ("b", 4)):
        prompt, images = with_images([1, 2, 3], [(1, rows, rows)])
        one.add(prompt, max_tokens=3, targets={"lora_name": name, "images": images})
    one.step(1)
    one.abort(text)
    one.drain(1)


def test_cached_pages_of_adapters_and_images_are_expected() -> None:
    one = loop("a", images=Images(8, FIRST), prefix_caching=True)
    prompt, images = with_images([*range(17)], [(2, 1, 4)])
    fields: dict[str, Any] = {"lora_name": "a", "images": images}
    params = SamplingParams(max_tokens=1)
    request = Request(request_id="new", prompt_token_ids=prompt, params=params, **fields)
    assert hypothetical(one.scheduler, request).cached == 0
    one.add(prompt, max_tokens=1, targets=fields)
    one.drain(1)
    assert hypothetical(one.scheduler, request).cached == 20
