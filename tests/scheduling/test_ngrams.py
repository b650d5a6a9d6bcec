"""Drafts from the request itself, compared with a search through all of its tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.core.scheduling_options import SchedulingOptions
from jengine.core.speculation import AUTOMATIC, Speculation
from jengine.scheduling.drafters.choice import BestDraft, Forced, Ngrams, drafters_of
from jengine.scheduling.drafters.drafter import PLACES, Draft
from jengine.scheduling.drafters.suffix import Suffix


class Request(SimpleNamespace):
    """A sequence without more than tokens."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def drafts(tokens: list[int], shortest: int = 2, longest: int = 4, most: int = 5) -> list[int]:
    drafter: Any = Ngrams(shortest, longest, most)
    found: Draft | None = drafter.draft(Request(tokens=tokens), most)
    return [] if found is None else found.tokens


def test_what_followed_before() -> None:
    assert drafts([1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5, 6, 7]
    assert drafts([1, 2, 3, 9, 1, 2, 4, 8, 1, 2]) == [4, 8, 1, 2, 4], "the latest, which goes on with itself"
    assert drafts([5, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2], most=1) == [3], "the longest"
    assert drafts([7, 7, 7]) == [7] * 5
    assert drafts([1, 2, 3, 4]) == drafts([1]) == drafts([]) == []


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 3), st.integers(0, 3), st.data())
def test_as_a_search_finds_them(tokens: list[int], shortest: int, more: int, data: st.DataObject) -> None:
    """Whatever was asked before, and after tokens were taken away and others added."""
    longest, drafter, request = shortest + more, Ngrams(shortest, shortest + more, 8), Request(tokens=[])
    while len(request.tokens) < len(tokens):
        request.tokens = tokens[: len(request.tokens) + data.draw(st.integers(1, 9))]
        known = request.tokens
        best: tuple[int, int] = (0, 0)
        for end in range(shortest, len(known)):
            same = 0
            while same < min(longest, end) and known[end - same - 1] == known[-same - 1]:
                same += 1
            if same >= shortest:
                best = max(best, (same, end))
        expected: list[int] = []
        for i in range(8 if best[0] else 0):
            expected.append([*known, *expected][best[1] + i])
        places = sum(known[i : i + shortest] == known[-shortest:] for i in range(len(known) - shortest))
        found = drafter.draft(request, 8)  # type: ignore[arg-type]
        if places <= PLACES:
            assert found == (Draft(expected, best[0], "ngram") if expected else None)
        else:
            assert found is not None and len(found.tokens) == 8
    drafter.forget(request)  # type: ignore[arg-type]
    assert not drafter._known


def test_forced_tokens_are_likelier() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    watched: Any = BestDraft(drafters_of(SchedulingOptions(speculative_config=ngram)))
    mask = SimpleNamespace(forced=lambda: [8, 9, 10])
    request = Request(tokens=[1, 2, 1], request=SimpleNamespace(mask=mask))
    assert watched.draft(request) == Draft([8, 9], source="grammar")
    other = SimpleNamespace(forced=list)
    for mask_or_none in (None, other):
        request = Request(tokens=[1, 2, 1], request=SimpleNamespace(mask=mask_or_none))
        assert watched.draft(request) == Draft([2, 1], 1, "ngram")


def test_options() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    assert Speculation.of(ngram) == Speculation(3, 5, 5)
    assert Speculation.of({**ngram, "prompt_lookup_max": 4}) == Speculation(3, 4, 4)
    assert Speculation.of('{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}') == (
        Speculation(2, 1, 1)
    )
    assert EngineConfig().speculative_config == "auto"
    assert Speculation.of("auto") == Speculation(15, 2, 16, AUTOMATIC)
    assert Speculation.of(None) is Speculation.of("none") is Speculation.of("null") is None
    assert drafters_of(SchedulingOptions()) == ()
    found = drafters_of(SchedulingOptions(speculative_config=ngram))
    assert [type(one) for one in found] == [Forced, Ngrams] and all(one.max_drafts == 3 for one in found)
    found = drafters_of(SchedulingOptions(speculative_config="auto"))
    assert [type(one) for one in found] == [Forced, Suffix, Ngrams]


@pytest.mark.parametrize(
    "value, says",
    [
        ("ngram", "speculative_config='ngram': must be auto, none or a JSON object"),
        (3, "must be auto, none or an object"),
        (
            {"method": "eagle"},
            "speculative_config.method='eagle': must be ngram or suffix or draft_model or mtp or eagle3",
        ),
        ({"method": "ngram"}, "speculative_config.num_speculative_tokens=None: must be set"),
        ({"method": "ngram", "num_speculative_tokens": 16}, "at most 15"),
        (
            {"method": "ngram", "num_speculative_tokens": 1, "model": "x"},
            "speculative_config.model='x': unknown",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 3, "prompt_lookup_max": 2},
            "prompt_lookup_max=2: must be a whole number, at least 3",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 0},
            "prompt_lookup_min=0: must be a whole number, at least 1",
        ),
    ],
)
def test_what_is_refused(value: Any, says: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        EngineConfig(speculative_config=value)
    assert says in str(refused.value)
