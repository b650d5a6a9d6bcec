"""Several engines that answer as one: every request ends once, whatever they do."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jengine import EngineDead, InvalidArgument, Load, ProfileOptions, SamplingParams
from jengine.core.updates import Ended, TokenUpdate, Update
from jengine.engine.operations import GetPauseState, PauseState, ResetPrefixCache, Sleep, WakeUp, WriteProfile
from jengine.scheduling.requests.sequence_limits import SequenceLimits
from jengine.spi import BackOff, Fleet, Limits, Request, StepTotals

ROOM = SequenceLimits(max_model_len=64, page_size=4, pages=32)
LIMITS = Limits(sequence=ROOM, max_num_seqs=4, vocab_size=9, eos_token_ids=())
LOAD = Load(0, 0, 32, 32, 0, 0, page_size=4, first_token_seconds=0.0, decisions=(("throughput", 1),))


class Engine:
    """A backend that does what it is told."""

    makes_masks = True

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits, self.load, self.totals = limits, LOAD, StepTotals()
        self.requests: dict[str, Request] = {}
        self.asked: list[Callable[[Any, Exception | None], object]] = []
        self.operations: list[Any] = []
        self.deliver: Callable[[Sequence[Update]], None]
        self.fail: Callable[[BaseException], None]
        self.has_quit = False

    def connect(self, deliver: Any, fail: Any) -> None:
        self.deliver, self.fail = deliver, fail

    def add(self, *requests: Request) -> None:
        self.requests |= {request.request_id: request for request in requests}

    def end(self, request_id: str, reason: Any, stop_reason: str | None) -> None:
        self.requests.pop(request_id, None)

    def do(self, operation: Any, done: Any) -> None:
        self.asked.append(done)
        self.operations.append(operation)

    def quit(self, wait: bool = True) -> None:
        self.has_quit = True

    def say(self, request_id: str, last: bool = False) -> None:
        """A token of a request."""
        if last:
            del self.requests[request_id]
        self.deliver([TokenUpdate(request_id, 7, "stop" if last else None)])


def request(name: str, tokens: Sequence[int] = (1, 2, 3), **options: Any) -> Request:
    return Request(request_id=name, prompt_token_ids=list(tokens), params=SamplingParams(), **options)


class Connected:
    """A fleet, and what it delivers."""

    def __init__(self, count: int = 2) -> None:
        self.engines = [Engine() for _ in range(count)]
        self.time = 0.0
        self.fleet: Any = Fleet(self.engines, clock=lambda: self.time)
        self.got: list[Update] = []
        self.errors: list[BaseException] = []
        self.fleet.connect(self.got.extend, self.errors.append)

    @property
    def living(self) -> list[int]:
        """Indices of the engines that run."""
        return [i for i, member in enumerate(self.fleet._members) if member.lives]

    def has(self, name: str) -> int:
        """The index of the engine that has a request."""
        [found] = [i for i, engine in enumerate(self.engines) if name in engine.requests]
        return found


def test_prompts_go_where_their_beginning_is_cached_unless_that_takes_longer() -> None:
    one = Connected()
    shared = [*range(5)] * 8
    one.fleet.add(request("a", shared))
    first = one.has("a")
    one.engines[first].say("a", last=True)
    one.fleet.add(request("b", [1, 2, 3]))
    one.engines[one.has("b")].say("b", last=True)
    for i in range(3):
        one.fleet.add(request(f"c{i}", [*shared, i]))
        assert one.has(f"c{i}") == first
        one.engines[first].say(f"c{i}")
    one.fleet.add(request("d", shared, cache_salt="of another tenant"))
    assert one.has("d") != first, "nothing is cached for it, and there are fewer prompts"
    one.engines[1 - first].say("d")
    one.engines[first].load = LOAD._replace(first_token_seconds=1.0)
    one.fleet.add(request("e", shared))
    assert one.has("e") != first, "it would wait longer than computing takes"


def test_prompts_that_wait_count_before_the_load_says_so() -> None:
    one = Connected(3)
    for i in range(6):
        one.fleet.add(request(str(i), [i] * 40))
    assert sorted(one.has(str(i)) for i in range(6)) == [0, 0, 1, 1, 2, 2]


def test_the_rate_is_learned_from_prompts_that_were_alone() -> None:
    one = Connected(1)
    member = one.fleet._members[0]
    for i in range(200):
        one.fleet.add(request(f"{i}", [i, *range(63)]), request(f"{i}'", [i, *range(63)]))
        one.time += 0.64
        one.engines[0].say(f"{i}", last=True)
        one.engines[0].say(f"{i}'", last=True)
    assert member.ahead == 0 and not member.prompts and not one.fleet._prompts
    assert abs(one.fleet._rates["decode"].seconds - 0.01) < 1e-4, "all tokens are new: the first one is"


def test_a_lost_replica_loses_nothing_that_had_not_begun() -> None:
    one = Connected()
    for i in range(6):
        one.fleet.add(request(f"{i}", [i] * 20), request(f"{i}'", [i] * 20))
    lost = one.engines[0]
    names = [*lost.requests]
    assert 4 <= len(names) <= 8
    lost.say(names[0])
    one.fleet.end(names[2], "abort", None)
    assert not [update for update in one.got if isinstance(update, Ended)], "its client knows"
    lost.fail(EngineDead("killed"))
    ended = [update for update in one.got if isinstance(update, Ended)]
    assert {update.request_id for update in ended} == {names[0], names[1]}, "one prompt had begun"
    assert all(
        u.reason == "error" and "its replica has ended: killed" in (u.stop_reason or "") for u in ended
    )
    assert {*names[3:]} <= {*one.engines[1].requests} and names[2] not in one.engines[1].requests
    assert one.living == [1] and not one.errors
    lost.deliver([TokenUpdate(names[4], 3)])
    assert one.got[-1] != TokenUpdate(names[4], 3), "what it says later is too late"


def test_a_request_that_its_client_has_ended_is_not_moved() -> None:
    one = Connected()
    one.fleet.add(request("a"), request("b"))
    engine = one.engines[one.has("a")]
    engine.end = lambda *what: None  # type: ignore[method-assign]
    one.fleet.end("a", "abort", None)
    engine.fail(EngineDead("killed"))
    other = one.engines[1 - one.engines.index(engine)]
    assert [*other.requests] == ["b"] and not one.got
    other.say("b", last=True)
    living = [member for member in one.fleet._members if member.lives]
    assert not one.fleet._prompts and not [member for member in living if member.prompts or member.ahead]


def test_a_replaced_replica_serves_again_and_the_last_one_ends_the_whole() -> None:
    one = Connected()
    one.engines[0].fail(EngineDead("first"))
    one.fleet.add(request("a"))
    assert one.has("a") == 1
    one.engines[0] = Engine()
    one.fleet.replace(0, one.engines[0])
    one.fleet.add(request("b"))
    assert one.has("b") == 0 and one.living == [0, 1]
    with pytest.raises(InvalidArgument, match="needs the limits of the other engines"):
        one.fleet.replace(0, Engine(replace(LIMITS, vocab_size=10)))
    one.engines[0].fail(EngineDead("again"))
    one.engines[1].fail(EngineDead("the last"))
    assert [str(error) for error in one.errors] == ["the last"]
    with pytest.raises(EngineDead, match="all replicas have ended"):
        one.fleet.add(request("c"))
    late = Engine()
    one.fleet.quit()
    one.fleet.replace(0, late)
    assert late.has_quit


def test_an_operation_is_done_by_all_and_answered_once() -> None:
    one, answers = Connected(), list[Any]()
    for failing in (None, ValueError("full")):
        one.fleet.do(ResetPrefixCache(), lambda *answer: answers.append(answer))
        one.engines[1].asked.pop()("second", failing)
        one.engines[0].asked.pop()("first", None)
        assert len(answers) == 1
        assert answers.pop() == (("first", None) if failing is None else (None, failing))
    one.fleet.do(ResetPrefixCache(), lambda *answer: answers.append(answer))
    one.engines[0].asked.pop()("first", None)
    one.engines[1].fail(EngineDead("killed"))
    [(answer, error)] = answers
    assert answer is None and isinstance(error, EngineDead)


def test_all_replicas_finish_before_a_pause_or_sleep_is_done() -> None:
    one, answers = Connected(), list[Any]()
    state = PauseState(paused=True, idle=True, asleep=[], version=0)
    for operation, early, late in (
        (Sleep(mode="wait"), True, False),
        (GetPauseState(), state, state._replace(idle=False)),
    ):
        for last in (late, early):
            one.fleet.do(operation, lambda *answer: answers.append(answer))
            one.engines[0].asked.pop()(early, None)
            one.engines[1].asked.pop()(last, None)
            assert answers.pop() == (last, None)


def test_an_engine_that_joins_others_does_what_they_are_doing() -> None:
    one, answers = Connected(3), list[Any]()
    one.engines[0].fail(EngineDead("killed"))
    for operation in (WakeUp(), WriteProfile(ProfileOptions(), "folder", 0)):
        one.fleet.do(operation, lambda *answer: answers.append(answer))
    one.engines[1].asked[0]("first", None)
    joining = [Engine(), Engine()]
    one.fleet.replace(0, joining[0])
    assert joining[0].operations == [WakeUp()] and not answers
    one.engines[2].asked[0]("second", None)
    joining[0].asked[0]("third", None)
    assert answers == [("first", None)]
    joining[0].fail(EngineDead("killed"))
    one.fleet.replace(0, joining[1])
    assert joining[1].operations == []


def test_loads_are_sums() -> None:
    one = Connected()
    one.engines[0].load = LOAD._replace(running=2, first_token_seconds=0.5, accepted_tokens=(1, 2))
    one.engines[1].load = LOAD._replace(running=1, accepted_tokens=(4,))
    load = one.fleet.load
    assert (load.running, load.pages, load.page_size, load.first_token_seconds) == (3, 64, 4, 0.0)
    assert load.accepted_tokens == (5, 2) and load.decisions == (("throughput", 2),)
    assert load.resumptions == (0, 0, 0)


def test_counts_do_not_fall_when_a_replica_ends_and_is_replaced() -> None:
    one = Connected()
    for engine, count in zip(one.engines, (3, 4), strict=True):
        engine.load = LOAD._replace(running=1, preemptions=count, drafts=count, accepted_tokens=(count,))
    one.engines[0].fail(EngineDead("killed"))
    load = one.fleet.load
    assert (load.running, load.preemptions, load.drafts, load.accepted_tokens) == (1, 7, 7, (7,))
    one.engines[0] = Engine()
    one.engines[0].load = LOAD._replace(preemptions=1)
    one.fleet.replace(0, one.engines[0])
    assert one.fleet.load.preemptions == 8 and one.fleet.load.pages == 64
    for engine in one.engines:
        engine.fail(EngineDead("killed"))
    assert one.fleet.load.preemptions == 8, "also when none is left"


class Machine(RuleBasedStateMachine):
    """Every request ends exactly once, whatever happens in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.count, self.draw = Connected(3), 0, random.Random(0)
        self.open: set[str] = set()

    @property
    def living(self) -> list[Engine]:
        return [self.one.engines[i] for i in self.one.living]

    @rule(samples=st.integers(1, 3), length=st.integers(1, 12))
    def add(self, samples: int, length: int) -> None:
        if not self.living:
            return
        self.count += 1
        names = [f"{self.count}.{i}" for i in range(samples)]
        self.open |= {*names}
        self.one.fleet.add(*[request(name, range(length)) for name in names])

    @rule(pick=st.integers(0, 99), last=st.booleans())
    def say(self, pick: int, last: bool) -> None:
        waiting = [(engine, name) for engine in self.living for name in engine.requests]
        if waiting:
            engine, name = waiting[pick % len(waiting)]
            engine.say(name, last)

    @rule(pick=st.integers(0, 99))
    def end(self, pick: int) -> None:
        if self.open:
            name = sorted(self.open)[pick % len(self.open)]
            self.one.fleet.end(name, "abort", None)
            self.open.remove(name)

    @rule(pick=st.integers(0, 2))
    def fail(self, pick: int) -> None:
        if len(self.living) > 1:
            engine = self.living[pick % len(self.living)]
            engine.fail(EngineDead("killed"))

    @rule()
    def replace(self) -> None:
        for i in {*range(3)} - {*self.one.living}:
            self.one.engines[i] = Engine()
            self.one.fleet.replace(i, self.one.engines[i])

    @invariant()
    def ends_once(self) -> None:
        for update in self.one.got:
            assert update.request_id in self.open, "it had ended"
            if isinstance(update, Ended) or getattr(update, "finish_reason", None):
                self.open.remove(update.request_id)
        self.one.got.clear()
        owned = [name for engine in self.living for name in engine.requests]
        assert sorted(owned) == sorted(self.open), "each open request is at one living replica"
        members = [m for m in self.one.fleet._members if m.lives]
        prompts = {id(p) for p in self.one.fleet._prompts.values()}
        assert sum(len(m.prompts) for m in members) == len(prompts)
        waiting = {id(p): p.new for p in self.one.fleet._prompts.values() if not p.begun}
        assert sum(m.ahead for m in members) == sum(waiting.values())


TestMachine = Machine.TestCase


def test_counts_of_an_engine_that_has_ended_are_kept() -> None:
    past = LOAD._replace(resumptions=(1, 2, 3), preemptions=4)
    later = LOAD._replace(resumptions=(5, 6, 7), preemptions=1).after(past)
    assert (later.resumptions, later.preemptions) == ((6, 8, 10), 5)


# --- restarts -----------------------------------------------------------------------------------------


class Restarted:
    """A fleet that starts others in place of its engines, without delay."""

    def __init__(self, make: Callable[[int], Engine]) -> None:
        self.engines = [Engine(), Engine()]
        self.fleet = Fleet(self.engines, make=make, back_off=lambda: BackOff(first=0.0, longest=0.0))
        self.fleet.connect(lambda updates: None, lambda error: None)

    def fail(self, index: int) -> list[threading.Thread]:
        """Ends an engine. Returns the thread that starts another."""
        self.engines[index].fail(EngineDead("killed"))
        return [thread for thread in threading.enumerate() if thread.name == f"restart-{index}"]


def test_an_engine_that_is_refused_as_a_replacement_is_ended() -> None:
    """Its limits hold the number of pages, which depends on the memory that is left."""
    made = list[Engine]()
    outcomes = [replace(LIMITS, vocab_size=10), OSError("not free"), replace(LIMITS, vocab_size=11), LIMITS]

    def make(index: int) -> Engine:
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        made.append(Engine(outcome))
        return made[-1]

    one = Restarted(make)
    for thread in one.fail(0):
        thread.join(60)
    assert [engine.has_quit for engine in made] == [True, True, False]
    assert one.fleet.backends == [made[-1], one.engines[1]] and one.fleet.restarts == 1
    one.fleet.quit()
    assert made[-1].has_quit and one.engines[1].has_quit


def test_an_engine_that_is_started_when_the_whole_has_ended_is_ended() -> None:
    begun, go_on, made = threading.Event(), threading.Event(), list[Engine]()

    def make(index: int) -> Engine:
        begun.set()
        go_on.wait(60)
        made.append(Engine())
        return made[-1]

    one = Restarted(make)
    [restarting] = one.fail(1)
    assert begun.wait(60)
    assert one.fail(0) == [], "there is nothing to start again"
    go_on.set()
    restarting.join(60)
    assert made[0].has_quit and not one.fleet.restarts and not one.fleet.lives
