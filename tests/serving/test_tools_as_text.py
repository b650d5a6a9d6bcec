"""Tools with models whose chat template has none, or whose format of calls is unknown: their definitions are
text, and calls are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.serving.conftest import MockServer, serve_mock
from tests.serving.test_http_tools import CALL, END, WEATHER, asked, streamed, whole
from tests.text.conftest import byte_level, write

# as SmolLM2's: it has no tools
PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def without_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockServer]:
    folder: Path = write(byte_level(), tmp_path_factory.mktemp("plain"))
    (folder / "chat_template.jinja").write_text(PLAIN)
    with serve_mock(folder, server={"port": 0}) as server:
        yield server
        server.wait_until_idle()


def prompted(server: MockServer, says: str, **options: Any) -> tuple[int, str]:
    """The status, and the prompt as text, or the error's message."""
    body = {**asked(says, **options), "stop": ["<NEVER>"], "max_tokens": 1, "return_token_ids": True}
    answer = httpx.post(f"{server.http}/chat/completions", json=body, timeout=60)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"]
    text = httpx.post(
        server.http.removesuffix("/v1") + "/detokenize",
        json={"tokens": answer.json()["prompt_token_ids"]},
        timeout=60,
    )
    return 200, text.json()["prompt"]


def test_forced_calls_without_tools_in_the_template(without_tools: MockServer) -> None:
    """The definitions come in a system message; the grammar guarantees the form."""
    status, prompt = prompted(without_tools, "Rain?", tool_choice="required")
    definition = json.dumps(WEATHER["function"])
    assert status == 200 and prompt == (
        f"<system>You can call these functions:\n{definition}\n\nAnswer with a JSON array of calls and"
        ' nothing else: [{"name": "...", "parameters": {...}}]<user>Rain?' + END
    )
    named = {"type": "function", "function": {"name": "weather"}}
    tools = [WEATHER, {"type": "function", "function": {"name": "news"}}]
    system = {"role": "system", "content": "Be brief."}
    messages = [system, *asked("Rain?")["messages"]]
    status, prompt = prompted(without_tools, "", tool_choice=named, tools=tools, messages=messages)
    assert (
        status == 200
        and prompt.startswith(f"<system>Be brief.\n\nCall this function:\n{definition}\n\nAnswer")
        and "news" not in prompt
    )


def test_calls_and_results_without_tools_in_the_template(without_tools: MockServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    status, prompt = prompted(without_tools, "", tool_choice="none", messages=messages)
    text = '<assistant>[{"name": "weather", "parameters": {"city": "Rome"}}]<user>Result of the call:\nrain'
    text += "\n\nAnswer the question with it."
    assert (status, prompt) == (200, text)


@pytest.mark.parametrize("options", [{}, {"tool_choice": "auto"}])
def test_a_choice_without_tools_in_the_template(without_tools: MockServer, options: dict[str, Any]) -> None:
    """The system message describes the tools and the form of calls, at /tokenize too."""
    status, prompt = prompted(without_tools, "Rain?", **options)
    definition = json.dumps(WEATHER["function"])
    assert status == 200 and prompt == (
        f"<system>You can call these functions:\n{definition}\n\nTo call functions, answer with a JSON"
        ' array of calls and nothing else: [{"name": "...", "parameters": {...}}]'
        "\nOtherwise answer with text."
        "<user>Rain?" + END
    )
    body = {"messages": asked("Rain?")["messages"], "tools": [WEATHER]}
    base = without_tools.http.removesuffix("/v1")
    tokens = httpx.post(f"{base}/tokenize", json=body, timeout=60).json()["tokens"]
    text = httpx.post(f"{base}/detokenize", json={"tokens": tokens}, timeout=60).json()["prompt"]
    assert text == prompt
    assert "functions" not in prompted(without_tools, "Rain?", tool_choice="none")[1]


# hides the tools' definitions, so that the mock engine answers with the last message alone
HIDING = "{% for m in messages if 'functions' not in m.content %}{{ m.content }}{% endfor %}"
PLAIN_CALL = '{"name": "weather", "parameters": {"city": "Köln"}}'
PLAIN_CALLS = f'[{PLAIN_CALL}, {{"name": "weather", "parameters": {{}}}}]'


@pytest.mark.parametrize("parser", ["auto", "hermes"])
def test_plain_calls(parser: str, tmp_path: Path) -> None:
    """Where the template has no tools, an answer that is an array of calls calls them. A parser that is
    named reads its format, too.
    """
    folder = write(byte_level(), tmp_path)
    (folder / "chat_template.jinja").write_text(HIDING)
    with (
        serve_mock(folder, server={"port": 0, "tool_call_parser": parser}) as server,
        OpenAI(base_url=server.http, api_key="none", max_retries=0, timeout=60) as client,
    ):
        for says in (PLAIN_CALLS, f"```json\n{PLAIN_CALLS}\n```", PLAIN_CALL):
            message, reason = whole(client, says)
            assert message.content is None and reason == "tool_calls", message
            assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln"}
            assert [call["arguments"] for call in streamed(client, says)[2]] == [
                call.function.arguments for call in message.tool_calls
            ]
        for says in ('[{"name": "news", "parameters": {}}]', "[1, 2]", "It rains.", "```json\n{}\n```"):
            assert whole(client, says)[0].content == streamed(client, says)[0] == says
        called = whole(client, CALL)[0].tool_calls
        assert bool(called) == (parser == "hermes")


# turns must alternate, and there is no system message
STRICT = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
STRICT += "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# shows tools and their calls in a format for which there is no parser
UNREAD = "{% if tools %}<tools>{{ tools }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
UNREAD += "{% for c in m.tool_calls or [] %}<odd>{{ c.function.name }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", [PLAIN, STRICT, UNREAD])
def test_a_conversation_with_tools_in_every_interface(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Question, call, result: the prompt has them all, and a grammar constrains the answer."""
    folder = write(byte_level(), tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    function, given = WEATHER["function"], {"city": "Rome"}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(given)}}
    user = {"role": "user", "content": "Rain?"}
    use = {"type": "tool_use", "id": "1", "name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "1"}
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {
            "messages": [
                user,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "It pours."},
            ],
            "tools": [WEATHER],
            "max_tokens": 1,
        },
        "responses": {
            "input": [
                user,
                {"type": "function_call", "call_id": "1", **call["function"]},
                {"type": "function_call_output", "call_id": "1", "output": "It pours."},
            ],
            "tools": [{"type": "function", **function}],
            "max_output_tokens": 1,
        },
        "messages": {
            "messages": [
                user,
                {"role": "assistant", "content": [{**use, "input": given}]},
                {"role": "user", "content": [{**result, "content": "It pours."}]},
            ],
            "tools": [{"name": "weather", "input_schema": function["parameters"]}],
            "max_tokens": 1,
        },
    }
    with serve_mock(folder, server={"port": 0}) as server:
        prepare, seen = server.llm.prepare, []

        def prepared(prompt: Any, params: Any) -> Any:
            seen.append((prompt["prompt"], params.structured_outputs.grammar))
            return prepare(prompt, params)

        monkeypatch.setattr(server.llm, "prepare", prepared)
        for path, body in bodies.items():
            answer = httpx.post(f"{server.http}/{path}", json={"model": "mock", **body}, timeout=60)
            assert answer.status_code == 200, answer.text
    assert len(seen) == 3 and len({prompt for prompt, _ in seen}) == 1
    prompt, grammar = seen[0]
    definition = json.dumps(function)
    assert f"You can call these functions:\n{definition}" in prompt and "<tools>" not in prompt
    rest = prompt.partition("<assistant>")[2]
    # a template that shows calls and results keeps its form of them
    shown = (
        "It pours." if template == UNREAD else "<user>Result of the call:\nIt pours.\n\nAnswer the question"
    )
    assert "weather" in rest and shown in rest
    assert "TEXT" in grammar and "weather" in grammar


def test_a_template_by_its_name(tmp_path: Path) -> None:
    folder = write(byte_level(), tmp_path)
    (folder / "chat_template.jinja").write_text(PLAIN)
    (folder / "additional_chat_templates").mkdir()
    for name, source in (("shows", PLAIN + "{# <tool_call> #}{{ tools }}"), ("tools_hidden", PLAIN)):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    with serve_mock(folder, server={"port": 0, "client_chat_templates": True}) as server:
        for name, text in (("shows", False), ("tools_hidden", True)):
            status, prompt = prompted(server, "Rain?", chat_template=name)
            assert status == 200 and ("You can call these functions" in prompt) == text, prompt
