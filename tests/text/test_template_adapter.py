"""Conversations in the form of a template: roles, ids, arguments, and messages that are split or joined."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.api.chat import chat_prompt
from jengine.text import template_adapter
from jengine.text.chat_template import ChatTemplate
from jengine.text.template_adapter import adapt_messages, arguments_of, joined, nine_characters
from jengine.text.template_traits import SPEAKERS, TemplateTraits
from jengine.text.tokenizer import Tokenizer
from tests.text import tool_templates
from tests.text.conftest import byte_level

USER = {"role": "user", "content": "Q"}
SYSTEM, DEVELOPER = {"role": "system", "content": "S"}, {"role": "developer", "content": "D"}
ANY = TemplateTraits()
WELL_FORMED = st.characters(exclude_categories=["Cs"])


def called(*ids: str, content: Any = None, arguments: Any = '{"a": 1}') -> dict[str, Any]:
    calls = [
        {"id": own, "type": "function", "function": {"name": f"f{own}", "arguments": arguments}}
        for own in ids
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(own: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": own, "content": f"r{own}"}


@pytest.mark.parametrize(
    "traits, messages, expected",
    [
        (ANY, [DEVELOPER, SYSTEM, USER], [("developer", "D"), ("system", "S"), ("user", "Q")]),
        (
            replace(ANY, developer=False, several_developers=False),
            [DEVELOPER, USER],
            [("system", "D"), ("user", "Q")],
        ),
        (
            replace(ANY, developer=False, several_developers=False),
            [SYSTEM, DEVELOPER, USER, DEVELOPER],
            [("system", "S"), ("system", "D"), ("user", "Q"), ("system", "D")],
        ),
        (
            replace(ANY, developer=False, several_developers=False, several_systems=False),
            [DEVELOPER, USER, SYSTEM],
            [("system", "D\n\nS"), ("user", "Q")],
        ),
        (
            replace(ANY, several_developers=False, several_systems=False),  # gpt-oss
            [SYSTEM, DEVELOPER, USER],
            [("system", "S\n\nD"), ("user", "Q")],
        ),
        (
            replace(ANY, developer=False, several_developers=False, several_systems=False, system=False),
            [SYSTEM, {"role": "assistant", "content": "A"}, USER],
            [("assistant", "A"), ("user", "S\n\nQ")],
        ),
        (replace(ANY, consecutive_users=False), [USER, USER, SYSTEM], [("user", "Q\n\nQ"), ("system", "S")]),
    ],
)
def test_instructions(
    traits: TemplateTraits, messages: list[dict[str, Any]], expected: list[tuple[str, str]]
) -> None:
    assert [(message["role"], message["content"]) for message in adapt_messages(messages, traits)] == expected


def test_images_stay_in_joined_messages() -> None:
    image = {"type": "image"}
    seen = {"role": "user", "content": [image]}
    traits = replace(ANY, system=False, developer=False, several_systems=False, several_developers=False)
    [message] = adapt_messages([SYSTEM, seen], traits)
    assert message["content"] == [{"type": "text", "text": "S"}, image]


def test_many_messages_are_joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other would copy the first text as often as there are messages."""
    calls = []

    def counted(*contents: Any, gap: str = "\n\n") -> Any:
        calls.append(contents)
        return joined(*contents, gap=gap)

    monkeypatch.setattr(template_adapter, "joined", counted)
    thought = {"role": "assistant", "content": "", "reasoning_content": "R"}
    traits = replace(ANY, consecutive_users=False, reasoning="reasoning_content")
    user, answer = adapt_messages([*[USER] * 300, *[thought] * 300], traits)
    assert user["content"] == "\n\n".join("Q" * 300) and len(calls) < 10
    assert answer["reasoning_content"] == "\n\n".join("R" * 300)


def test_ids_of_nine_characters() -> None:
    traits = replace(ANY, ids="nine")
    long, short = "call_0123456789abcdef", "abcdefgh9"
    first, one, other = adapt_messages([called(long, short), result(short), result(long)], traits)
    ids = [call["id"] for call in first["tool_calls"]]
    assert ids == [nine_characters(long), short] == [one["tool_call_id"], other["tool_call_id"]]
    assert adapt_messages([result(long)], traits)[0]["tool_call_id"] == ids[0], "of a call that is not there"
    for odd in (None, 5, [1], {"a": "b"}):  # whatever a client sends
        call = {**called("x")["tool_calls"][0], "id": odd}
        history = [{**called("x"), "tool_calls": [call]}, {**result("x"), "tool_call_id": odd}]
        said, answer = adapt_messages(history, traits)
        assert len(said["tool_calls"][0]["id"]) == 9
        assert odd is None or answer["tool_call_id"] == said["tool_calls"][0]["id"]


@given(st.text(WELL_FORMED, max_size=40), st.text(WELL_FORMED, max_size=40))
def test_nine_characters_tell_ids_apart(one: str, other: str) -> None:
    made = nine_characters(one)
    assert len(made) == 9 and made.isascii() and made.isalnum()
    assert (made == nine_characters(other)) == (one == other)


def test_ids_with_the_names() -> None:
    turns = adapt_messages(
        [called("x", "y"), result("y"), result("x"), called("z"), result("z")], replace(ANY, ids="named")
    )
    assert [call["id"] for turn in turns for call in turn.get("tool_calls", [])] == [
        "functions.fx:0",
        "functions.fy:1",
        "functions.fz:2",
    ]
    assert [turn["tool_call_id"] for turn in turns if turn["role"] == "tool"] == [
        "functions.fx:0",
        "functions.fy:1",
        "functions.fz:2",
    ]


def test_several_calls_become_several_turns() -> None:
    """Each call is followed by its own result, whatever the order of results."""
    turns = adapt_messages(
        [called("x", "y", content="T"), result("y"), result("x"), USER], replace(ANY, several_calls=False)
    )
    assert [turn["role"] for turn in turns] == ["assistant", "tool", "assistant", "tool", "user"]
    assert [turns[0]["content"], turns[2]["content"]] == ["T", None]
    assert [turns[1]["content"], turns[3]["content"]] == ["rx", "ry"]


@given(st.recursive(st.none() | st.text() | st.integers(), lambda part: st.dictionaries(st.text(), part)))
def test_arguments(value: Any) -> None:
    """An object, or text that is lost by no template."""
    text = json.dumps(value)
    parsed, shown = arguments_of(text)
    assert shown == text and parsed == (value if isinstance(value, dict) else None)
    if isinstance(value, dict):
        assert arguments_of(value)[0] == value and json.loads(arguments_of(value)[1]) == value


def test_arguments_of_too_many_parts_are_text() -> None:
    text = json.dumps({"a": [[]] * 2**17})
    assert arguments_of(text) == (None, text)


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TRAITS: dict[str, dict[str, Any]] = {
    "SmolLM2": {"calls": False, "results": False},
    "Qwen 3": {
        **{"developer": False, "several_developers": False, "any_arguments": True},
        "reasoning": "reasoning_content",
    },
    "Qwen 3.5": {
        **{"developer": False, "several_systems": False, "several_developers": False},
        "no_content": "empty",
    },
    "Llama 3.1": {"text_of_calls": "before", "several_calls": False, "any_arguments": True},
    "Llama 3.2": {},
    "Mistral": {
        **{"developer": False, "several_systems": False, "several_developers": False},
        **{"consecutive_users": False, "user_after_result": False, "text_of_calls": "later"},
        **{"any_arguments": True, "ids": "nine"},
    },
    "DeepSeek R1": {
        **{"developer": False, "several_developers": False},
        **{"text_of_calls": "before", "arguments": "text", "any_arguments": True},
    },
    "DeepSeek R1 Distill": {
        **{"developer": False, "several_systems": False, "several_developers": False},
        **{"text_of_calls": "before", "arguments": "text", "any_arguments": True},
    },
    "DeepSeek V3.1": {
        **{"developer": False, "several_developers": False, "arguments": "text", "any_arguments": True},
    },
    "Kimi K2": {"any_arguments": True, "ids": "named"},
    "GLM 4.5": {"developer": False, "several_developers": False},
    "MiniMax M2": {},
    "gpt-oss": {
        **{"several_systems": False, "several_developers": False, "several_calls": False},
        **{"any_arguments": True, "reasoning": "thinking", "reasoning_beside_text": False},
        "text_of_calls": "current",
    },
    "Gemma 2": {
        **{"system": False, "developer": False, "several_systems": False, "several_developers": False},
        **{"consecutive_users": False, "calls": False, "results": False},
    },
    "Qwen VL": {"any_arguments": True},
    "named results": {"named_results": True, "any_arguments": True, "names": frozenset(["tool"])},
}


@pytest.mark.parametrize("name", tool_templates.ALL)
def test_traits(name: str) -> None:
    assert ChatTemplate(tool_templates.ALL[name], SPECIAL).traits == replace(ANY, **TRAITS[name])


def test_a_template_that_rejects_everything_gets_conversations_as_they_are() -> None:
    template = ChatTemplate("{{ raise_exception('never') }}{{ messages[0].tool_calls }}", {})
    assert template.traits == replace(ANY, names=frozenset(SPEAKERS))


def test_templates_of_other_roles_get_what_they_were_given() -> None:
    """Rerankers' have queries and documents."""
    template = ChatTemplate("{% for m in messages if m.role == 'query' %}{{ m.content }}{% endfor %}", {})
    assert template.render([{"role": "query", "content": "x"}], add_generation_prompt=False) == "x"


def test_a_continued_message_that_is_moved() -> None:
    tokenizer = Tokenizer(byte_level(), {"eos_token": "</s>"})
    with pytest.raises(ValueError, match=r"continue_final_message=True: .* hides the last message"):
        chat_prompt(
            tokenizer,
            [USER, DEVELOPER],
            chat_template=tool_templates.QWEN_3_5,
            continue_final_message=True,
        )
