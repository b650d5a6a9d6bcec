"""Prompts computed by one engine and answered by another: every request ends once, whichever of them ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jengine import EngineDead, InvalidArgument, SamplingParams
from jengine.core.updates import Ended, Update
from jengine.engine.operations import ResetPrefixCache
from jengine.spi import Fleet
from tests.fleet.test_fleet import LOAD, Engine, request

LONG = range(20)


class Connected:
    """Both engines, and what they deliver."""

    def __init__(self) -> None:
        self.prefill, self.decode = Engine(), Engine()
        self.asked: list[Engine] = []
        self.both: Any = Fleet([self.decode], [self.prefill], address=self.address)
        self.got: list[Update] = []
        self.errors: list[BaseException] = []
        self.both.connect(self.got.extend, self.errors.append)

    def address(self, engine: Engine) -> str | None:
        self.asked.append(engine)
        return f"here:{len(self.asked)}"

    @property
    def computing(self) -> dict[str, Any]:
        """Prompts at the prefill engine, by name."""
        return {name: prompt for name, prompt in self.both._members[1].prompts.items()}


def test_a_prompt_is_computed_and_then_answered() -> None:
    one = Connected()
    seeded = SamplingParams(seed=4, n=2, max_tokens=9, stop="x")
    samples = [request(name, LONG, priority=3, cache_salt="s") for name in "ab"]
    for sample in samples:
        sample.params = seeded
    one.both.add(*samples)
    for sent in one.prefill.requests.values():
        assert (sent.params.max_tokens, sent.params.temperature, sent.pages_from) == (1, 0.0, None)
        assert (sent.priority, sent.cache_salt, sent.prompt_token_ids) == (3, "s", [*LONG])
    assert [*one.prefill.requests] == ["a"] and not one.decode.requests
    one.prefill.say("a", last=True)
    assert [*one.decode.requests] == ["a", "b"] and not one.got, "no client gets its token"
    assert {sent.pages_from for sent in one.decode.requests.values()} == {"here:1"}
    assert [sent.params for sent in one.decode.requests.values()] == [seeded] * 2
    one.decode.say("a")
    one.decode.say("a", last=True)
    assert len(one.got) == 2
    # what no pages can help
    one.both.add(request("short", [1, 2, 3]))
    scored = request("scored", LONG)
    scored.params = SamplingParams(prompt_logprobs=1)
    one.both.add(scored)
    one.both.add(request("adapted", LONG, lora_name="french"))
    assert {*one.decode.requests} == {"b", "short", "scored", "adapted"} and not one.prefill.requests


def test_ends_of_clients_and_engines() -> None:
    one = Connected()
    one.both.add(*[request(name, LONG) for name in "ab"])
    one.both.end("a", "abort", None)
    one.prefill.say("a", last=True)
    assert [*one.decode.requests] == ["b"]
    one.both.add(request("c", LONG))
    one.both.end("c", "abort", None)
    assert not one.prefill.requests and "c" not in one.decode.requests
    # an error or a refusal of the prefill engine is not the end: the other computes it
    one.both.add(request("d", LONG))
    one.prefill.deliver([Ended("d", "error", "out of luck")])
    assert "d" in one.decode.requests and not one.got
    one.both.add(request("e", LONG))
    one.prefill.fail(EngineDead("killed"))
    assert one.decode.requests["e"].pages_from is None and not one.errors
    one.both.add(request("f", LONG))
    assert "f" in one.decode.requests, "until there is another"
    again = Engine()
    one.both.replace(1, again)
    one.both.add(request("g", LONG))
    assert [*again.requests] == ["g"]
    one.decode.fail(EngineDead("killed too"))
    assert [str(error) for error in one.errors] == ["killed too"]
    with pytest.raises(InvalidArgument, match="needs the limits of the other engines"):
        one.both.replace(1, Engine(Any))  # type: ignore[arg-type]
    one.both.quit()
    assert again.has_quit and one.decode.has_quit
    late = Engine()
    one.both.replace(1, late)
    assert late.has_quit


def test_operations_and_loads_are_of_both() -> None:
    one, answers = Connected(), list[Any]()
    one.both.do(ResetPrefixCache(), lambda *answer: answers.append(answer))
    one.prefill.asked.pop()("prefill's", None)
    one.decode.asked.pop()("decode's", None)
    assert answers == [("decode's", None)]
    one.both.do(ResetPrefixCache(), lambda *answer: answers.append(answer))
    one.decode.asked.pop()("decode's", None)
    one.prefill.load = LOAD._replace(preemptions=3)
    one.prefill.fail(EngineDead("killed"))
    assert answers[1][0] is None and isinstance(answers[1][1], EngineDead)
    one.decode.load = LOAD._replace(preemptions=4, running=1)
    assert (one.both.load.preemptions, one.both.load.running, one.both.load.pages) == (7, 1, 32)


class Machine(RuleBasedStateMachine):
    """Every request ends exactly once, in whatever order things happen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.count = Connected(), 0
        self.open: set[str] = set()
        self.lives = True

    @rule(samples=st.integers(1, 3), length=st.integers(1, 12))
    def add(self, samples: int, length: int) -> None:
        self.count += 1
        names = [f"{self.count}.{i}" for i in range(samples)]
        self.open |= {*names}
        self.one.both.add(*[request(name, range(length)) for name in names])

    @rule(pick=st.integers(0, 99), how=st.sampled_from(["computed", "error", "refused"]))
    def prefill(self, pick: int, how: str) -> None:
        engine = self.one.prefill
        if not (self.lives and engine.requests):
            return
        name = sorted(engine.requests)[pick % len(engine.requests)]
        if how == "computed":
            engine.say(name, last=True)
        else:
            del engine.requests[name]
            engine.deliver([Ended(name, "error" if how == "error" else "abort", how)])

    @rule(pick=st.integers(0, 99), last=st.booleans())
    def decode(self, pick: int, last: bool) -> None:
        engine = self.one.decode
        if engine.requests:
            engine.say(sorted(engine.requests)[pick % len(engine.requests)], last)

    @rule(pick=st.integers(0, 99))
    def end(self, pick: int) -> None:
        if self.open:
            name = sorted(self.open)[pick % len(self.open)]
            self.one.both.end(name, "abort", None)
            self.open.remove(name)

    @rule()
    def lose(self) -> None:
        if self.lives:
            self.lives = False
            late = [*self.one.prefill.requests]
            self.one.prefill.fail(EngineDead("killed"))
            for name in late:
                self.one.prefill.say(name, last=True)

    @rule()
    def replace(self) -> None:
        if not self.lives:
            self.lives, self.one.prefill = True, Engine()
            self.one.both.replace(1, self.one.prefill)

    @invariant()
    def ends_once(self) -> None:
        for update in self.one.got:
            assert update.request_id in self.open, "it had ended, or was not to be seen"
            if isinstance(update, Ended) or getattr(update, "finish_reason", None):
                self.open.remove(update.request_id)
        self.one.got.clear()
        waiting = {name for prompt in self.one.computing.values() for name in prompt.left}
        assert not waiting & {*self.one.decode.requests}
        assert waiting | {*self.one.decode.requests} == self.open
        assert {*self.one.both._prompts} == self.open
        assert {*self.one.computing} == ({*self.one.prefill.requests} if self.lives else set())


TestMachine = Machine.TestCase
