"""Tool calls and reasoning with OpenAI's client. The mock engine repeats its prompt, so messages determine
the model's output.
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
from tests.serving.echo import ECHO, serve_echo
from tests.text.conftest import byte_level, write

END = "<END>"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SAID = '[{"name": "weather", "parameters": {"city": "Köln"}}]'  # the call as text, since ECHO shows none


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockServer]:
    with serve_echo(tmp_path_factory.mktemp("echo")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: MockServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.http, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def asked(says: str, **options: Any) -> dict[str, Any]:
    """A request that gets this answer."""
    messages = [{"role": "user", "content": says + END}]
    return {
        "model": "mock",
        "messages": messages,
        "stop": [END],
        "max_tokens": 500,
        "tools": [WEATHER],
        **options,
    }


def whole(client: OpenAI, says: str, **options: Any) -> tuple[Any, str]:
    [choice] = client.chat.completions.create(**asked(says, **options)).choices
    return choice.message, choice.finish_reason


def streamed(client: OpenAI, says: str, **options: Any) -> tuple[str, str, list[dict[str, Any]], str | None]:
    """Content, reasoning, calls, and the finish reason."""
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    reason = None
    for event in client.chat.completions.create(**asked(says, **options), stream=True):
        [choice] = event.choices
        reason = choice.finish_reason or reason
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        assert len(choice.delta.tool_calls or []) <= 1, "many clients read only the first"
        for call in choice.delta.tool_calls or []:
            if call.id:
                assert call.index == len(calls) and call.type == "function"
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments or ""
    return content, reasoning, calls, reason


def test_a_call(client: OpenAI) -> None:
    message, reason = whole(client, "Let me see.\n" + CALL)
    [call] = message.tool_calls
    assert (message.content, reason, call.type, call.function.name) == (
        "Let me see.",
        "tool_calls",
        "function",
        "weather",
    )
    assert json.loads(call.function.arguments) == {"city": "Köln"} and call.id.startswith("call_")
    content, _, [streamed_call], reason = streamed(client, "Let me see.\n" + CALL)
    assert (content, reason, streamed_call["name"]) == ("Let me see.", "tool_calls", "weather")
    assert streamed_call["arguments"] == call.function.arguments and streamed_call["id"] != call.id


def test_an_effort_that_the_template_uses(client: OpenAI) -> None:
    assert whole(client, " work", tools=None, reasoning_effort="high")[0].content == "high work"


def test_several_calls(client: OpenAI) -> None:
    message, _ = whole(client, CALL + CALL)
    assert message.content is None and [call.function.name for call in message.tool_calls] == ["weather"] * 2
    assert len({call.id for call in message.tool_calls}) == 2 and len(streamed(client, CALL + CALL)[2]) == 2
    assert len(whole(client, CALL + CALL, parallel_tool_calls=False)[0].tool_calls) == 1
    assert len(streamed(client, CALL + CALL, parallel_tool_calls=False)[2]) == 1


def test_no_call(client: OpenAI) -> None:
    for options in ({"tool_choice": "none"}, {"tools": None}):
        message, reason = whole(client, CALL, **options)
        assert (message.content, message.tool_calls, reason) == (CALL, None, "stop")
        assert streamed(client, CALL, **options) == (CALL, "", [], "stop")
    assert whole(client, "Nice weather.") == (whole(client, "Nice weather.", tools=None)[0], "stop")


def test_reasoning(client: OpenAI) -> None:
    says = "<think>\nHm, the weather.\n</think>\n\nIt rains.\n" + CALL
    message, reason = whole(client, says)
    assert (message.reasoning_content, message.content, reason) == (
        "Hm, the weather.",
        "It rains.",
        "tool_calls",
    )
    content, reasoning, [call], _ = streamed(client, says)
    assert (content, reasoning, call["name"]) == ("It rains.", "Hm, the weather.", "weather")
    hidden, _ = whole(client, says, extra_body={"include_reasoning": False})
    assert not hasattr(hidden, "reasoning_content") and hidden.content == "It rains."
    assert streamed(client, says, extra_body={"include_reasoning": False})[1] == ""


def test_a_cut_off_call(client: OpenAI) -> None:
    """max_tokens ends the call: the answer has its beginning, and finish_reason is length."""
    message, reason = whole(client, CALL, max_tokens=40)
    [call] = message.tool_calls
    assert reason == "length" and '{"city": "Köln"}'.startswith(call.function.arguments)


def test_a_conversation_with_calls_and_results(client: OpenAI, server: MockServer) -> None:
    message, _ = whole(client, CALL)
    history = [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"},
    ]
    history[0]["content"] = ""
    answer = client.chat.completions.create(
        model="mock", messages=[*history, *asked("It rains.")["messages"]], stop=[END], max_tokens=100
    )  # type: ignore[arg-type]
    assert answer.choices[0].message.content == SAID + "rainIt rains."


@pytest.mark.parametrize(
    "options, param",
    [
        ({"tool_choice": {"type": "function", "function": {"name": "news"}}}, "tool_choice.function.name"),
        ({"tool_choice": "required", "structured_outputs": {"json": {"type": "object"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}],
                "tool_choice": "required",
            },
            "tools[0]",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ],
)
def test_what_is_wrong(server: MockServer, options: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{server.http}/chat/completions", json=asked("x", **options), timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error


def test_errors_of_schemas_name_the_tool(server: MockServer) -> None:
    """As the client wrote it, in each API."""
    bad = {"properties": {"n": {"$ref": "#/$defs/None"}}}
    news = {"type": "function", "function": {"name": "news", "parameters": bad}}
    paths = {
        "/chat/completions": asked("x", tools=[WEATHER, news], tool_choice="required"),
        "/responses": {
            "model": "mock",
            "input": "x",
            "tools": [{"type": "function", **tool["function"]} for tool in (WEATHER, news)],
            "tool_choice": "required",
        },
        "/messages": {
            "model": "mock",
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"name": "weather", "input_schema": {}}, {"name": "news", "input_schema": bad}],
            "tool_choice": {"type": "any"},
        },
    }
    for path, body in paths.items():
        answer = httpx.post(server.http + path, json=body, timeout=60)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and message.startswith("tools[1]="), message
        assert "'/$defs/None' does not exist" in message and "StructuredOut" not in message


BAD: dict[str, Any] = {"properties": {"n": {"$ref": "#/$defs/None"}}}


@pytest.mark.parametrize(
    "options, param, says",
    [
        ({}, "response_format", "'/$defs/None' does not exist"),
        ({"schema": {}, "parameters": BAD}, "tools[0]", "'/$defs/None' does not exist"),
        ({"schema": {}, "parameters": {"type": "string"}}, "tools[0]", "must be object"),
        (
            {"schema": None, "structured_outputs": {"grammar": "start: ("}},
            "structured_outputs",
            "='start: (': llguidance cannot",
        ),
    ],
)
def test_tools_beside_a_schema(server: MockServer, options: dict[str, Any], param: str, says: str) -> None:
    """The constraint has both."""
    options = {"schema": BAD, "parameters": {}, **options}
    tool = {"type": "function", "function": {"name": "news", "parameters": options.pop("parameters")}}
    schema = options.pop("schema")
    if schema is not None:
        options["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = asked("x", tools=[tool], **options)
    answer = httpx.post(f"{server.http}/chat/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and says in error["message"], error


FORM = {"type": "json_object"}
NATIVE = f"{{# <tool_call> #}}{{{{ tools }}}}{ECHO}"


@pytest.mark.parametrize(
    "template, options, rules",
    [
        (NATIVE, {}, ["answer: calls | text", '"\\"weather\\""', "<tool_call>", "thought"]),
        (NATIVE, {"tool_choice": "none"}, ["answer: text", "thought"]),
        (NATIVE, {"tool_choice": "required"}, ["answer: calls\n", '"\\"weather\\""']),
        ("{# no #}{{ messages[0].content }}", {}, ["answer: calls | text", 'calls: "["']),
        ("{# <|channel|>analysis #}{{ tools }}", {}, ["(calls | final)", "to=functions."]),
        ("{# <|channel|>analysis #}{{ messages[0].content }}", {"tools": None}, ["analysis* (final)"]),
    ],
)
def test_calls_or_a_schema(
    template: str, options: dict[str, Any], rules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The constraint that reaches the engine, in each API."""
    folder = write(byte_level(), tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    constraints = []
    function = WEATHER["function"]
    choice = {"type": {"required": "any"}.get(options.get("tool_choice"), options.get("tool_choice", "auto"))}
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": asked("x", response_format=FORM, **options),
        "responses": {
            "input": "x",
            "text": {"format": FORM},
            "max_output_tokens": 5,
            "tools": [{"type": "function", **function}],
            **options,
        },
        "messages": {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 5,
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            "tools": [{"name": "weather", "input_schema": function["parameters"]}],
            "tool_choice": choice,
        },
    }
    if "tools" in options:
        del bodies["messages"]["tools"], bodies["messages"]["tool_choice"]
    with serve_mock(folder, server={"port": 0}) as server:
        prepare = server.llm.prepare

        def prepared(prompt: Any, params: Any) -> Any:
            constraints.append(params.structured_outputs.grammar)
            return prepare(prompt, params)

        monkeypatch.setattr(server.llm, "prepare", prepared)
        for path, body in bodies.items():
            answer = httpx.post(f"{server.http}/{path}", json={"model": "mock", **body}, timeout=60)
            assert answer.status_code == 200, answer.text
    assert len(constraints) == 3
    for grammar in constraints:
        assert all(rule in grammar for rule in rules), grammar


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls_in_channels(choice: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the model's format, so that it can reason first."""
    folder = write(byte_level(), tmp_path)
    (folder / "chat_template.jinja").write_text(
        f"{{# <|channel|>analysis #}}{{% if tools %}}{{% endif %}}{ECHO}"
    )
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.weather"
    said += '<|channel|>commentary json<|message|>{"city": "x"}<|call|>'
    grammars = []
    with serve_mock(folder, server={"port": 0}) as server:
        prepare = server.llm.prepare

        def prepared(prompt: Any, params: Any) -> Any:
            grammars.append(params.structured_outputs.grammar)
            return prepare(prompt, params)

        monkeypatch.setattr(server.llm, "prepare", prepared)
        body = asked(said, tool_choice=choice)
        answer = httpx.post(f"{server.http}/chat/completions", json=body, timeout=60).json()["choices"][0]
    assert "answer: analysis* calls" in grammars[0] and "to=functions." in grammars[0]
    [call] = answer["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", '{"city": "x"}')
    assert answer["message"]["reasoning_content"] == "Hm." and not answer["message"]["content"]
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_calls_beside_a_schema_are_parsed(client: OpenAI, kind: str) -> None:
    """The mock engine knows no constraints."""
    form = {"type": kind, **({"json_schema": {"name": "a", "schema": {}}} if kind == "json_schema" else {})}
    assert whole(client, CALL, response_format=form)[1] == "tool_calls"
    assert whole(client, "{}", response_format=form)[0].content == "{}"


def test_null_is_no_value_at_any_depth(server: MockServer) -> None:
    """Clients send it for optional fields. In schemas and arguments, it is a value."""
    call = {"id": "1", "type": "function", "index": None, "function": {"name": "weather", "arguments": "{}"}}
    nullable = {"type": "object", "properties": {"city": {"enum": ["x", None], "default": None}}}
    function = {"name": "weather", "description": None, "strict": None, "parameters": nullable}
    part = {"type": "text", "text": "Rain?" + END, "cache_control": None}
    chat = asked(
        "",
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
            {"role": "tool", "tool_call_id": "1", "content": "r", "name": None},
            {"role": "user", "content": [part]},
        ],
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        stream_options=None,
        structured_outputs=None,
    )
    response = {
        "model": "mock",
        "input": [
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": None},
            {"type": "function_call_output", "call_id": "1", "output": [{**part, "type": "input_text"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "x", "cache_control": None}]},
        ],
        "tools": [{"type": "function", **function}],
        "text": {"format": {"type": "text", "name": None}, "verbosity": None},
        "reasoning": {"effort": None, "summary": None},
        "max_output_tokens": 5,
    }
    message = {
        "model": "mock",
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": "x", "id": None},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": None}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": None}]},
        ],
        "tools": [{"name": "f", "input_schema": nullable, "description": None, "cache_control": None}],
        "thinking": {"type": "disabled", "display": None},
    }
    for path, body in (("/chat/completions", chat), ("/responses", response), ("/messages", message)):
        answer = httpx.post(server.http + path, json=body, timeout=60)
        assert answer.status_code == 200, (path, answer.text)


def test_calls_cannot_be_continued(server: MockServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {"model": "mock", "messages": [{"role": "user", "content": "x"}, said]}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    for url in (f"{server.http}/chat/completions", f"{server.http.removesuffix('/v1')}/tokenize"):
        answer = httpx.post(url, json=body, timeout=60)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "continue_final_message"


def test_a_continued_thought(client: OpenAI) -> None:
    """The mock engine repeats the prompt: its last turn says whether its answer is a thought."""
    for said, kind in (("<think>\nFirst,", "reasoning_content"), ("<think>a</think>\n\nThe", "content")):
        messages = [
            {"role": "user", "content": "</think> is a tag"},
            {"role": "assistant", "content": said},
        ]
        more = {"continue_final_message": True, "add_generation_prompt": False}
        message, _ = whole(client, "", messages=messages, tools=None, max_tokens=5, extra_body=more)
        assert getattr(message, kind), message
