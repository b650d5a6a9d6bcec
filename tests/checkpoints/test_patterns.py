"""Regular expressions of files: what Python's `re` matches, in bounded time."""

from __future__ import annotations

import re

import pytest

from jengine.checkpoints.lora_config import InvalidPattern, full_matches

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


def test_matches_are_those_of_python() -> None:
    names = [*NAMES, "a\nb", "é"]
    patterns = [*KNOWN, "a.b", r"\w", "lm_head$", r"(?i:LM)_head", r"(.)\1*", "a++"]
    expected = [{name for name in names if re.fullmatch(pattern, name)} for pattern in patterns]
    assert full_matches(patterns, names) == expected
    assert all(0 < len(matching) < len(NAMES) for matching in expected[: len(KNOWN)])
    assert full_matches([], names) == []


@pytest.mark.parametrize("pattern", [r"([a-z_.0-9]+)+!", r"((a|a)*|(a|a)*)*!", r"(((.*)*)*)*(((.*)*)*)*!"])
def test_patterns_that_backtrack_for_ever(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jengine.checkpoints.lora_config.SECONDS", 1)
    with pytest.raises(InvalidPattern, match="takes too long") as refused:
        full_matches(["a", pattern, "b"], ["a" * 200])
    assert refused.value.number == 1


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "is no regular expression: missing"),
        ("a{99999999999999999999}", "is no regular expression: the repetition number is too large"),
        ("(" * 4000 + ")" * 4000, "is no regular expression: maximum recursion depth exceeded"),
        ("a" * 10_001, "has 10001 characters, more than 10000"),
    ],
)
def test_what_is_rejected(pattern: str, why: str) -> None:
    with pytest.raises(InvalidPattern, match=re.escape(why)):
        full_matches([pattern], NAMES)
