"""Drafts from earlier outputs: what is found, what is not (other tenants'), and the bounds."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.core.scheduling_options import SchedulingOptions
from jengine.core.speculation import MOST_DRAFTS, SHORTEST, Speculation, SuffixDecoding
from jengine.scheduling.drafters import drafter
from jengine.scheduling.drafters import suffix as suffix_module
from jengine.scheduling.drafters.choice import Forced, drafters_of
from jengine.scheduling.drafters.drafter import Draft
from jengine.scheduling.drafters.suffix import PROBES, EarlierOutputs, Suffix


@dataclass(eq=False)
class Said:
    """What the drafter reads of a sequence."""

    tokens: list[int]
    client: str = ""
    salt: str | None = None
    num_preemptions: int = 0
    searches: bool = False
    finish_reason: str | None = None
    prompt_len: int = field(init=False)
    request: Any = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len, self.request = len(self.tokens), SimpleNamespace(cache_salt=self.salt)


class Asked:
    """A drafter, and requests that use it."""

    def __init__(self, most_tokens: int = 2**20, **how: Any) -> None:
        self.drafter: Any = Suffix(SuffixDecoding(**how), MOST_DRAFTS, most_tokens)

    def said(self, output: list[int], prompt: tuple[int, ...] = (90,), **tenant: Any) -> Said:
        """A request that has ended with this output."""
        one = Said([*prompt], **tenant)
        one.tokens += output
        self.drafter.forget(one)
        return one

    def drafts(self, tokens: list[int], most: int = 5, **tenant: Any) -> list[int]:
        """For a new request, of which this is the prompt."""
        one = Said(tokens, **tenant)
        found = self.continued(one, most)
        self.drafter.forget(one)
        return found

    def continued(self, one: Said, most: int = 5) -> list[int]:
        """A request's drafts."""
        draft = self.drafter.draft(one, most)
        return [] if draft is None else draft.tokens


def test_earlier_outputs_are_found() -> None:
    asked = Asked(max_spec_factor=9.0)
    assert asked.drafts([1, 2, 3]) == []
    asked.said([1, 2, 3, 4, 5])
    assert asked.drafts([8, 1, 2, 3]) == [4, 5]
    assert asked.drafts([1, 2, 3], most=1) == [4]
    assert asked.drafts([2, 3]) == asked.drafts([3, 4, 5]) == asked.drafts([]) == []
    asked.said([7, 1, 2, 3, 6], prompt=(1, 2, 3, 9))
    assert asked.drafts([7, 1, 2, 3]) == [6], "the longer match"
    assert asked.drafts([0, 1, 2, 3]) == [6], "among equals the latest; prompts are not found"


def test_the_last_tokens_of_a_request_that_failed_are_not_found() -> None:
    """They may be no tokens of the vocabulary."""
    asked = Asked()
    failed = asked.said([1, 2, 3, 511], finish_reason="error")
    assert failed.tokens[-1] == 511 and asked.drafts([1, 2, 3]) == []
    asked.said([1, 2, 3, 4])
    assert asked.drafts([1, 2, 3]) == [4]


def test_running_requests_are_found_and_the_request_itself() -> None:
    asked = Asked(max_spec_factor=9.0)
    one, other = Said([9]), Said([8])
    one.tokens += [1, 2, 3, 4]
    assert asked.continued(one) == []
    other.tokens += [1, 2, 3]
    assert asked.continued(other) == [4]
    one.tokens += [5]
    assert asked.continued(one) == []
    assert asked.continued(other) == [4, 5]
    assert asked.drafts([5, 6, 7, 8, 5, 6, 7], most=3) == [8, 5, 6], (
        "its own prompt, which goes on with itself"
    )
    asked.drafter.forget(one)
    asked.drafter.forget(other)
    assert not asked.drafter._running


def test_the_majority_until_it_is_unlikely() -> None:
    asked = Asked(max_spec_factor=9.0, min_token_prob=0.5)
    for output in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 6], [1, 2, 3, 8, 8, 8], [1, 2, 3, 4, 5, 7]):
        asked.said(output)
    assert asked.drafts([1, 2, 3]) == [4, 5], "3 of 4, 2 of 4, then 1 of 4"
    asked = Asked(max_spec_factor=9.0, min_token_prob=0.8)
    for output in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 6]):
        asked.said(output)
    assert asked.drafts([1, 2, 3]) == [4]


def test_longer_matches_give_more_drafts() -> None:
    asked = Asked(max_tree_depth=6, max_spec_factor=0.7)
    asked.said([*range(30)])
    assert [len(asked.drafts([*range(10 - length, 10)], 15)) for length in (2, 3, 4, 5, 6, 9)] == [
        0, 2, 2, 3, 4, 4,
    ]  # fmt: skip
    assert asked.drafter.draft(Said([5, 6, 7, 8]), 15) == Draft([9, 10], 4, "suffix")
    assert Asked(max_spec_factor=0.0).drafts([1, 2, 3, 1, 2, 3]) == []


def test_a_preempted_request_enters_its_output_once() -> None:
    asked, one = Asked(), Said([9])
    one.tokens += [1, 2, 3, 4]
    asked.drafter.forget(one)
    one.num_preemptions += 1
    asked.drafter.draft(one, 5)
    one.tokens += [5, 6]
    asked.drafter.forget(one)
    assert asked.drafter._earlier._tokens == 6
    beams = Said([9], searches=True)
    beams.tokens += [1, 2, 3]
    asked.drafter.forget(beams)
    assert asked.drafter._earlier._tokens == 6


# --- tenants -------------------------------------------------------------------------------------------

TENANTS = [{"client": "a"}, {"client": "b"}, {"client": "a", "salt": "x"}, {"client": "b", "salt": "x"}]


def test_another_client_or_salt_finds_nothing() -> None:
    for mine in TENANTS:
        asked = Asked()
        asked.said([1, 2, 3, 4, 5], **mine)
        assert [asked.drafts([1, 2, 3], **tenant) for tenant in TENANTS] == [
            [4, 5] if tenant == mine else [] for tenant in TENANTS
        ]


def test_tenants_whose_hashes_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_module, "hash", lambda _: 5, raising=False)
    outputs = EarlierOutputs(SHORTEST, 100, 100)
    for tenant in ("a", "b", "a"):
        outputs.extend(outputs.open(tenant), [1, 2, 3, 4])
    found = {
        tenant: [output.tenant for output, _ in outputs.places(tenant, [1, 2, 3])]
        for tenant in ("a", "b", "c")
    }
    assert found == {"a": ["a", "a"], "b": ["b"], "c": []}


Events = list[tuple[int, int, list[int]]]  # of a tenant: which of its requests says more; 0: it ends
EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.lists(st.integers(0, 2), max_size=6)), max_size=40
)


def answers(events: Events, tenants: set[int]) -> list[list[int]]:
    """The first tenant's drafts, if these tenants are there."""
    asked, running, found = Asked(), dict[tuple[int, int], Said](), list[list[int]]()
    for who, which, more in events:
        if who not in tenants:
            continue
        if not which:
            for key in [key for key in running if key[0] == who]:
                asked.drafter.forget(running.pop(key))
            continue
        one = running.setdefault((who, which), Said([0, 1], **TENANTS[who]))
        one.tokens += more
        draft = asked.continued(one)
        if not who:
            found.append(draft)
    return found


@given(EVENTS)
def test_drafts_do_not_depend_on_other_tenants(events: Events) -> None:
    assert answers(events, {0, 1, 2, 3}) == answers(events, {0})


def test_drafts_depend_on_the_same_tenant() -> None:
    """The comparison above could fail."""
    events: Events = [(1, 1, [2, 2, 0, 1, 1]), (0, 1, [2, 2, 0])]
    assert answers(events, {0, 1}) == [[]]
    assert answers([(0, 2, [2, 2, 0, 1, 1]), (0, 1, [2, 2, 0])], {0})[-1] == [1, 1]


# --- bounds --------------------------------------------------------------------------------------------


@given(
    st.integers(1, 4),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 1), min_size=1, max_size=7)), max_size=60),
)
def test_the_oldest_leave(most_outputs: int, most_tokens: int, events: list[tuple[int, list[int]]]) -> None:
    """Never more outputs or tokens than allowed, and what is found is there, in the latest ones."""
    outputs, opened = EarlierOutputs(2, most_outputs, most_tokens), list[Any]()
    for which, tokens in events:
        kept = [output for output in opened if output.kept]
        if which < len(kept):
            output = kept[which]
        else:
            output = outputs.open(which % 2)
            opened.append(output)
        outputs.extend(output, tokens)
        kept = [output for output in opened if output.kept]
        assert len(outputs._outputs) == len(kept) <= most_outputs
        assert outputs._tokens == sum(len(output.tokens) for output in kept) <= most_tokens
        assert kept == opened[len(opened) - len(kept) :]
        for found, end in outputs.places(1, tokens[-2:]):
            assert found in kept and found.tenant == 1 and 2 <= end < len(found.tokens)


def test_the_latest_places_are_found_however_much_is_kept() -> None:
    outputs = EarlierOutputs(SHORTEST, 10_000, 2**15)
    for number in range(3000):
        outputs.extend(outputs.open("a"), [1, 2, 3, number])
    looked = list[int]()

    class Counting(dict[int, Any]):
        def get(self, number: Any, default: Any = None) -> Any:
            looked.append(number)
            return super().get(number, default)

    outputs._outputs = Counting(outputs._outputs)  # type: ignore[assignment]
    found = [output.tokens[end] for output, end in outputs.places("a", [1, 2, 3])]
    assert found == [*range(2999, 2999 - PROBES, -1)] and len(looked) == PROBES
    assert [*outputs.places("b", [1, 2, 3])] == []


def test_memory_does_not_grow() -> None:
    outputs = EarlierOutputs(SHORTEST, 50, 2**12)

    def fill() -> int:
        for number in range(2000):
            outputs.extend(outputs.open(f"client {number}"), [number % 7, *range(number, number + 60)])
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = fill()
        assert abs(fill() - first) < 20_000
    finally:
        tracemalloc.stop()
    assert len(outputs._outputs) == 50
    rings = outputs._latest, outputs._previous, outputs._owner, outputs._end
    assert sum(ring.nbytes for ring in rings) == 28 * 2**12


def test_a_call_enters_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is entered over several calls, and so is an output that no draft was asked for."""
    for module in (drafter, suffix_module):
        monkeypatch.setattr(module, "AT_ONCE", 10)
    text = drafter.Places(3)
    prompt = [*range(25), 0, 1, 2]
    text.of_end(prompt)
    assert text._entered == 12
    assert [text.of_end(prompt), text.of_end(prompt), text._entered] == [[3], [3], 27]
    asked = Asked()
    asked.said([*range(25)])
    assert asked.drafter._earlier._tokens == 10


def test_without_earlier_outputs() -> None:
    asked = Asked(max_cached_requests=0)
    asked.said([1, 2, 3, 4])
    assert asked.drafter._earlier is None
    assert asked.drafts([1, 2, 3]) == [] and asked.drafts([1, 2, 3, 4, 1, 2, 3]) == [4, 1, 2]


# --- options -------------------------------------------------------------------------------------------


def test_options() -> None:
    assert Speculation.of({"method": "suffix"}) == Speculation(MOST_DRAFTS, suffix=SuffixDecoding())
    how = Speculation.of(
        '{"method": "suffix", "num_speculative_tokens": 7, "suffix_decoding_max_tree_depth": 30,'
        ' "suffix_decoding_max_spec_factor": 2, "suffix_decoding_min_token_prob": 0.3,'
        ' "suffix_decoding_max_cached_requests": 5}'
    )
    assert how == Speculation(7, suffix=SuffixDecoding(30, 5, 2, 0.3))
    forced, drafter = drafters_of(SchedulingOptions(speculative_config={"method": "suffix"}))
    assert isinstance(forced, Forced) and isinstance(drafter, Suffix) and drafter.max_drafts == MOST_DRAFTS


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"suffix_decoding_max_tree_depth": 2}, "max_tree_depth=2: must be a whole number, at least 3"),
        ({"suffix_decoding_max_cached_requests": -1}, "max_cached_requests=-1: must be"),
        ({"suffix_decoding_max_spec_factor": "1"}, "max_spec_factor='1': must be a number, at least 0"),
        ({"suffix_decoding_min_token_prob": 1.5}, "min_token_prob=1.5: must be in [0, 1]"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0: must be"),
        ({"prompt_lookup_min": 1}, "prompt_lookup_min=1: unknown; known: num_speculative_tokens, suffix_"),
        ({"method": ["suffix"]}, "must be ngram or suffix"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        EngineConfig(speculative_config={"method": "suffix", **fields})
    assert says in str(refused.value)
