"""Regular expressions of files: what Python's `re` matches, in bounded time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.checkpoints.patterns import InvalidPattern, NameMatcher

LAYERS = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(12) for part in "qkvo"]
NAMES = [*LAYERS, "lm_head", "model.visual.blocks.0.attn.qkv", "a", ""]
# what adapters on the hub have as target_modules
KNOWN = [
    r".*\.(q|v)_proj",
    r"^(?!.*(?:visual|head)).*(?:q_proj|k_proj).*",
    r"^(model(?=\.).*\.(q_proj|v_proj))$",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn)\.(?:(?:k_proj)))",
    r"(.*\.)?(^model\.layers\.1\..*)",
    r".*layers\.(1[0-1]|[2-4])\..*(?<!k)_proj",
    r"[^.]+\.\w+\.\d{2,}\.\S*\B.",
]
single = st.sampled_from(["a", "b", ".", r"\.", r"\w", r"\W", r"\d", "[ab]", "[^a.]", "[a-c0-9]"])
zero_width = st.sampled_from(["^", "$", r"\b", r"\B", ""])


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map("|".join).map("({})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{,2}", "*?", "{2,}"])).map(
            lambda both: f"(?:{both[0]}){both[1]}"
        ),
        st.tuples(st.sampled_from(["(?=", "(?!"]), inner).map(lambda both: f"{both[0]}{both[1]})"),
        st.tuples(st.sampled_from(["(?<=", "(?<!"]), single).map(lambda both: f"{both[0]}{both[1]})"),
    )


@given(
    pattern=st.recursive(single | zero_width, larger, max_leaves=8),
    names=st.lists(st.text("ab.1é\n", max_size=6), max_size=5),
)
def test_matches_are_those_of_python(pattern: str, names: list[str]) -> None:
    assert NameMatcher(names).full_matches(pattern) == {name for name in names if re.fullmatch(pattern, name)}


@pytest.mark.parametrize("pattern", KNOWN)
def test_patterns_of_adapters(pattern: str) -> None:
    expected = {name for name in NAMES if re.fullmatch(pattern, name)}
    assert NameMatcher(NAMES).full_matches(pattern) == expected and 0 < len(expected) < len(NAMES)


@pytest.mark.parametrize(
    "pattern",
    [
        r"([a-z_.0-9]+)+!",
        r"(a?){1000000000}b*!",
        r"((a|a)*|(a|a)*)*!",
        r"(((.*)*)*)*(((.*)*)*)*!",
        r"(?=(.*)*!)(.*)*",
    ],
)
def test_patterns_that_backtrack_for_ever(pattern: str) -> None:
    assert NameMatcher(NAMES).full_matches(pattern) == set()


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "is no regular expression: missing"),
        ("a{99999999999999999999}", "is no regular expression: the repetition number is too large"),
        (r"(a)\1", "groupref is not supported"),
        ("(?>a)", "atomic_group is not supported"),
        ("a++", "possessive_repeat is not supported"),
        ("(?i)a", "flags are not supported"),
        ("(?i:a)", "flags are not supported"),
        ("(" * 4000 + ")" * 4000, "has groups in too many groups"),
        ("a" * 10_001, "has 10001 characters, more than 10000"),
    ],
)
def test_what_is_rejected(pattern: str, why: str) -> None:
    with pytest.raises(InvalidPattern, match=re.escape(why)):
        NameMatcher(NAMES).full_matches(pattern)


def test_all_patterns_together_may_take_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jengine.checkpoints.patterns.MAX_STEPS", 100)
    matcher = NameMatcher(NAMES)
    with pytest.raises(InvalidPattern, match="takes too long"):
        for _ in range(100):
            assert matcher.full_matches("lm_head") == {"lm_head"}
