"""Stop strings in pieces against a plain search over every prefix of the whole text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from jengine.text.completion import StopAutomaton, StopStrings


def plain(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def may_become_a_stop(held: str, stops: tuple[str, ...]) -> bool:
    return any(stop.startswith(held) and held != stop for stop in stops)


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({0, len(text), *(p for p in places if p <= len(text))})
    return [text[a:b] for a, b in pairwise(at)]


few_letters = st.text(alphabet="ab🙂\n", max_size=30)


@given(
    few_letters,
    st.lists(st.text(alphabet="ab🙂\n", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 30)),
)
@example("aabaabaaab", ["aabaaab", "baab"], [1, 2, 3, 4, 5, 6, 7, 8, 9])
@example("abcab", ["abcd", "c"], [])
@example("xyz", ["yz", "xyz", "z"], [2])
def test_any_cutting_gives_the_plain_answer(text: str, stop_list: list[str], places: list[int]) -> None:
    stops = tuple(stop_list)
    want_text, want_stop = plain(text, stops)
    matcher, out, given_text = StopStrings(StopAutomaton.of(stops)), "", ""
    for piece in cut(text, places):
        given_text += piece
        safe, stop = matcher.push(piece)
        out += safe
        if stop is not None:
            assert (out, stop) == (want_text, want_stop)
            return
        held = given_text[len(out) :]
        assert given_text.startswith(out)
        assert not held or may_become_a_stop(held, stops), "held back what can become no stop"
    assert want_stop is None
    assert out + matcher.flush() == want_text
    assert matcher.flush() == ""


def test_without_stops_nothing_is_held_back() -> None:
    matcher = StopStrings(StopAutomaton())
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_text_held_back_is_released_when_it_goes_on_otherwise() -> None:
    matcher = StopStrings(StopAutomaton.of(("\n\nclass",)))
    assert matcher.push("pass\n") == ("pass", None)
    assert matcher.push("\n") == ("", None)
    assert matcher.push("def") == ("\n\ndef", None)
    assert matcher.push("\n\ncl") == ("", None)
    assert matcher.push("ass Stack") == ("", "\n\nclass")


def test_early_text_meets_no_stop_but_may_begin_one() -> None:
    matcher = StopStrings(StopAutomaton.of(("abc", "bc")))
    assert matcher.push("abc ab", early=True) == ("abc ", None)
    assert matcher.push("x ab", early=True) == ("abx ", None)
    assert matcher.push("c") == ("", "abc")
