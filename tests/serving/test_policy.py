"""What happens to fields on which not every server acts: the table, the page that shows it, and the code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import docs_pages
import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from jengine import InvalidArgument, SamplingParams, Tokenizer
from jengine.serving.http import bodies
from jengine.serving.http.chat_completions import ChatCompletions
from jengine.serving.http.chat_service import ChatInput
from jengine.serving.http.messages.body import MessagesBody
from jengine.serving.http.messages.reply import Messages
from jengine.serving.http.parameters import read_tools
from jengine.serving.http.policy import CHAT, POLICIES, Outcome, _log_once, fields
from jengine.serving.parsers.formats import AnswerFormat
from tests.text.conftest import byte_level

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "request-fields.md"
HELLO = [{"role": "user", "content": "Hello."}]
READ: dict[str, Callable[[dict[str, Any]], ChatInput]] = {
    "/v1/chat/completions": ChatCompletions().read,
    "/v1/messages": Messages().read,
}
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
}
# all fields of their clients' types, and those that are read without a rule
FIELDS = {
    "/v1/chat/completions": (CompletionCreateParamsBase, {*get_type_hints(bodies.ChatBody), "modalities"}),
    "/v1/messages": (MessageCreateParamsBase, {*get_type_hints(MessagesBody), "max_tokens"}),
}
OUTCOMES = get_args(Outcome)


@pytest.mark.parametrize("path", POLICIES)
def test_the_page_shows_the_table(path: str) -> None:
    """Each name is in a row of the table with its outcome and note."""
    assert f"<!-- from the code: fields of {path} -->" in PAGE.read_text()
    rows = docs_pages.request_fields(path).splitlines()
    for outcome in OUTCOMES:
        for name, note in POLICIES[path][outcome].items():
            assert any(f"`{name}`" in row and row.endswith(f" | {outcome} | {note} |") for row in rows)


@pytest.mark.parametrize("path", READ)
def test_every_field_of_an_api_is_known(path: str) -> None:
    """A new version of a client's types must not bring fields for which there is no rule."""
    policy, (type, read) = POLICIES[path], FIELDS[path]
    ruled = set().union(*(fields(policy, outcome) for outcome in OUTCOMES))
    assert sum(len(policy[outcome]) for outcome in OUTCOMES) == len(set().union(*policy.values()))
    assert set(get_type_hints(type)) <= ruled | read | set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("path", READ)
def test_fields_without_effect_are_accepted_and_logged_once(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    _log_once.cache_clear()
    names = sorted(fields(POLICIES[path], "accepted"))
    with caplog.at_level(logging.INFO, "jengine.serving"):
        for _ in range(2):
            asked = READ[path]({**BASE[path], **{name: {"any": ["thing"]} for name in names}})
    assert not set(names) & {*asked.body.fields, *asked.body.sampling, *asked.request}
    told = [record.getMessage() for record in caplog.records]
    assert [line.partition(" has no effect")[0] for line in told] == [f"{path}: {name}" for name in names]


@pytest.mark.parametrize(
    "path, name, note",
    [(path, *rule) for path in READ for rule in POLICIES[path]["error"].items() if rule[0].isidentifier()],
)
def test_other_fields_are_errors_that_say_what_to_do(path: str, name: str, note: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        READ[path]({**BASE[path], name: "x"})
    assert (caught.value.field, caught.value.limit) == (name, note)


def test_tools_that_only_other_servers_have() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(InvalidArgument) as messages:
        READ["/v1/messages"]({**BASE["/v1/messages"], "tools": [search]})
    custom = bodies.Body({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, {})
    with pytest.raises(InvalidArgument) as chat:
        read_tools(custom, AnswerFormat(Tokenizer(byte_level(), {})), True)
    for caught, path in ((messages, "/v1/messages"), (chat, "/v1/chat/completions")):
        assert (caught.value.field, caught.value.limit) == (
            "tools[0].type",
            POLICIES[path]["error"]["tools.type"],
        )


ON, OFF = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}
APPLIED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("reasoning_effort", {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
    ("reasoning.effort", {"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ("enable_thinking", {"enable_thinking": False}, {"chat_template_kwargs": OFF}),
    ("thinking", {"thinking": True}, {"chat_template_kwargs": ON}),
    ("thinking.type", {"thinking": {"type": "disabled"}}, {"chat_template_kwargs": OFF}),
    ("thinking.type", {"thinking": {"type": "auto"}}, {}),
    ("reasoning.enabled", {"reasoning": {"enabled": True}}, {"chat_template_kwargs": ON}),
    ("reasoning.exclude", {"reasoning": {"exclude": True}}, {"include_reasoning": False}),
    ("thinking_budget", {"thinking_budget": 7}, {"thinking_budget": 7}),
    ("thinking_budget_tokens", {"thinking_budget_tokens": 7}, {"thinking_budget": 7}),
    (
        "thinking.budget_tokens",
        {"thinking": {"type": "enabled", "budget_tokens": 7}},
        {"thinking_budget": 7, "chat_template_kwargs": ON},
    ),
    ("reasoning.max_tokens", {"reasoning": {"max_tokens": 7}}, {"thinking_budget": 7}),
    # chat_template_kwargs override the other fields
    (
        "enable_thinking",
        {"enable_thinking": True, "chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": True, "thinking": False}},
    ),
]


@pytest.mark.parametrize("field, given, expected", APPLIED)
def test_what_other_servers_fields_do_in_chats(
    field: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    asked = ChatCompletions().read({**BASE["/v1/chat/completions"], **given})
    assert asked.body.fields == {**BASE["/v1/chat/completions"], **expected}


def test_each_applied_field_of_chats_is_tested() -> None:
    assert {field for field, *_ in APPLIED} == CHAT["applied"].keys()


@pytest.mark.parametrize(
    "given, field, limit",
    [
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort", "differs from"),
        ({"enable_thinking": True, "thinking": False}, "enable_thinking", "differs from thinking=False"),
        ({"thinking_budget": -1}, "thinking_budget", "at least 0"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens", "at least 0"),
        ({"reasoning": {"depth": 1}}, "reasoning.depth", "not permitted"),
        ({"thinking": {"type": "deep"}}, "thinking", "'enabled'"),
        ({"thinking": {}}, "thinking", "required"),
        ({"enable_thinking": "no"}, "enable_thinking", "boolean"),
    ],
)
def test_wrong_fields_about_thinking(given: dict[str, Any], field: str, limit: str) -> None:
    with pytest.raises(InvalidArgument, match=limit) as caught:
        ChatCompletions().read({**BASE["/v1/chat/completions"], **given})
    assert caught.value.field.startswith(field)


def test_errors_of_a_budget_name_its_field() -> None:
    body = {**BASE["/v1/chat/completions"], "reasoning": {"max_tokens": 7, "effort": "low"}}
    names = ChatCompletions().read(body).names
    assert names["thinking_budget"] == "reasoning.max_tokens"
    assert names["reasoning_effort"] == "reasoning.effort"
