"""Anthropic's API with its client. The mock engine repeats its prompt, so messages determine the model's
output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from tests.serving.conftest import MockServer, serve_mock
from tests.serving.echo import serve_echo
from tests.serving.test_http_tools import CALL, END, SAID

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THOUGHT = "<think>\nHm, the weather.\n</think>\n\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockServer]:
    with serve_echo(tmp_path_factory.mktemp("echo")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: MockServer) -> Iterator[Anthropic]:
    base = server.http.removesuffix("/v1")
    with Anthropic(base_url=base, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def asked(says: str, **options: Any) -> dict[str, Any]:
    """A request that gets this answer."""
    messages = [{"role": "user", "content": says + END}]
    given = {"model": "mock", "messages": messages, "stop_sequences": [END], "max_tokens": 500, **options}
    return {name: value for name, value in given.items() if value is not None}


def post(server: MockServer, path: str = "/messages", **body: Any) -> httpx.Response:
    return httpx.post(server.http + path, json=body, timeout=60)


def test_text(client: Anthropic) -> None:
    message = client.messages.create(**asked("Hello."))
    [block] = message.content
    assert (block.type, block.text) == ("text", "Hello.")
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", END)
    assert message.id.startswith("msg_") and message._request_id == message.id.removeprefix("msg_")
    short = client.messages.create(**asked("Hello.", max_tokens=2))
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 2


def plain(message: Any) -> list[dict[str, Any]]:
    """The blocks without their ids."""
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


def streamed(client: Anthropic, **body: Any) -> Any:
    with client.messages.stream(**body) as stream:
        return stream.get_final_message()


def test_models_are_described_as_this_client_reads_them(server: MockServer, client: Anthropic) -> None:
    page = client.models.list()
    [model] = page.data
    assert (model.type, model.id, model.display_name, page.has_more) == ("model", "mock", "mock", False)
    assert model.created_at.year > 2000 and client.models.retrieve("mock") == model
    [as_openai] = httpx.get(server.http + "/models", timeout=60).json()["data"]
    assert (as_openai["object"], as_openai["id"]) == ("model", "mock")


def test_a_streamed_text(client: Anthropic) -> None:
    with client.messages.stream(**asked("Hello.")) as stream:
        assert "".join(stream.text_stream) == "Hello."
    message, whole = stream.get_final_message(), client.messages.create(**asked("Hello."))
    assert plain(message) == plain(whole) and message.stop_sequence == whole.stop_sequence == END
    for used in (message.usage, whole.usage):
        tokens = client.messages.count_tokens(model="mock", messages=asked("Hello.")["messages"])
        assert used.input_tokens + (used.cache_read_input_tokens or 0) == tokens.input_tokens
        assert used.output_tokens == whole.usage.output_tokens > 0


def test_thinking_and_a_call(client: Anthropic) -> None:
    says = THOUGHT + "It rains.\n" + CALL
    message = client.messages.create(**asked(says, tools=[WEATHER]))
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm, the weather.")
    assert (text.text, call.name, call.input) == ("It rains.", "weather", {"city": "Köln"})
    assert message.stop_reason == "tool_use" and call.id.startswith("toolu_")
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    answer = streamed(client, **asked(says, tools=[WEATHER]))
    assert plain(answer) == plain(message) and answer.stop_reason == "tool_use"
    hidden = asked(says, tools=[WEATHER], thinking={"type": "adaptive", "display": "omitted"})
    for answer in (client.messages.create(**hidden), streamed(client, **hidden)):
        assert [block.type for block in answer.content] == ["text", "tool_use"]


def test_an_agent(client: Anthropic) -> None:
    """The client's own objects go back as they came."""
    question = asked(THOUGHT + CALL, tools=[WEATHER], system=[{"type": "text", "text": "Be brief."}])
    question["system"][0]["cache_control"] = {"type": "ephemeral"}
    answer = client.messages.create(**asked(THOUGHT + CALL, tools=[WEATHER]))
    call = answer.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain", "is_error": False}
    follow = [result, {"type": "text", "text": "It rains." + END}]
    messages = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": follow}]
    for answer in (
        client.messages.create(**asked("", messages=messages, tools=[WEATHER])),
        streamed(client, **asked("", messages=messages, tools=[WEATHER])),
    ):
        assert plain(answer) == [{"type": "text", "text": SAID + "rainIt rains."}]


def test_calls(client: Anthropic) -> None:
    def names(**options: Any) -> list[list[str]]:
        body = asked(CALL + CALL, tools=[WEATHER], **options)
        answers = client.messages.create(**body), streamed(client, **body)
        return [[block.type for block in answer.content] for answer in answers]

    assert names() == [["tool_use"] * 2] * 2
    assert names(tool_choice={"type": "auto", "disable_parallel_tool_use": True}) == [["tool_use"]] * 2
    assert names(tool_choice={"type": "none"}) == [["text"]] * 2
    cut = client.messages.create(**asked("See.\n" + CALL, tools=[WEATHER], max_tokens=45))
    assert plain(cut) == [{"type": "text", "text": "See."}] and cut.stop_reason == "max_tokens"


@pytest.mark.parametrize("arguments", ["{city: 1}", "[1]", '{"city": "\\ud83d"}'])
def test_a_call_whose_arguments_are_no_object(client: Anthropic, arguments: str) -> None:
    """A client could not read it, so its arguments are text."""
    wrong = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    message = client.messages.create(**asked("See.\n" + wrong, tools=[WEATHER]))
    assert [block["text"] for block in plain(message)] == ["See.", arguments]
    assert message.stop_reason == "stop_sequence"
    both = client.messages.create(**asked(wrong + CALL, tools=[WEATHER]))
    assert [block.type for block in both.content] == ["text", "tool_use"] and both.stop_reason == "tool_use"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_forced_calls(client: Anthropic, choice: dict[str, Any]) -> None:
    """The mock engine ignores grammars, so it must write the calls' form itself."""
    says = '[{"name": "weather", "parameters": {"city": "Köln"}}]'
    says = says if choice["type"] == "any" else '{"city": "Köln"}'
    body = asked(says, tools=[WEATHER], tool_choice=choice)
    for answer in (client.messages.create(**body), streamed(client, **body)):
        assert plain(answer) == [{"type": "tool_use", "name": "weather", "input": {"city": "Köln"}}]


def test_what_the_template_gets(server: MockServer, client: Anthropic) -> None:
    effort = client.messages.create(**asked(" work", output_config={"effort": "high"}))
    assert plain(effort) == [{"type": "text", "text": "high work"}]
    joined = client.messages.create(
        **asked("", messages=[{"role": "user", "content": "a"}, {"role": "user", "content": "b" + END}])
    )
    assert plain(joined) == [{"type": "text", "text": "a\nb"}]
    continued = client.messages.create(**asked("", messages=[{"role": "assistant", "content": "ab" + END}]))
    assert plain(continued) == [{"type": "text", "text": "ab"}]


def events(server: MockServer, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and data, as they are sent."""
    text = post(server, **{**body, "stream": True}).text
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_the_order_of_events(server: MockServer) -> None:
    found = events(server, **asked(THOUGHT + "It rains.\n" + CALL, tools=[WEATHER]))
    assert all(name == data["type"] for name, data in found)
    order = [
        (name, data.get("index"), *(data.get(part, {}).get("type") for part in ("delta", "content_block")))
        for name, data in found
    ]
    expected = [("message_start", None, None, None), ("ping", None, None, None)]
    for index, (block, delta) in enumerate(
        (("thinking", "thinking_delta"), ("text", "text_delta"), ("tool_use", "input_json_delta"))
    ):
        expected += [
            ("content_block_start", index, None, block),
            ("content_block_delta", index, delta, None),
            ("content_block_stop", index, None, None),
        ]
    expected += [("message_delta", None, None, None), ("message_stop", None, None, None)]
    assert list(dict.fromkeys(order)) == expected
    kinds = {kind.__name__: kind for kind in anthropic.types.RawMessageStreamEvent.__args__[0].__args__}
    shapes = {kind.model_fields["type"].annotation.__args__[0]: kind for kind in kinds.values()}
    for name, data in found:
        if name != "ping":
            shapes[name].model_validate(data, strict=True)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_tokens": None}, "max_tokens=None: must be given"),
        ({"messages": []}, "messages: must have at least one message"),
        ({"n": 2}, "n=2: must be 1"),
        ({"stop": ["a"]}, "stop=['a']: the name is stop_sequences"),
        ({"mcp_servers": []}, "mcp_servers=[]: this server runs no tools itself"),
        ({"nothing": 1}, "nothing=1: there is no such"),
        ({"top_p": 2}, "top_p=2: must be in (0, 1]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type='any': needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name=None: must be given"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "a"}}, "must be one of the tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "tools[0].type='web_search_20250305'"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens=-1: "),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens=9: "),
        ({"thinking": {"type": "between_tools"}}, "thinking.type='between_tools'"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0]",
        ),
    ],
)
def test_what_is_wrong(server: MockServer, options: dict[str, Any], message: str) -> None:
    answer = post(server, **asked("x", **options))
    error = answer.json()
    assert answer.status_code == 400 and error["type"] == "error", error
    assert error["error"]["type"] == "invalid_request_error" and message in error["error"]["message"], error


@pytest.mark.parametrize(
    "content, message",
    [
        ([{"type": "image", "source": {"type": "file"}}], "messages[0].content[0].source"),
        ([{"type": "text", "text": 1}], "messages[0].content[0].text: "),
        (
            [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
            "supports text, image, tool_result",
        ),
        (
            [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document"}]}],
            "messages[0].content[0].content[0].type: this server supports text, image here",
        ),
        ([], "must have a message with content"),
        (1, "messages[0].content: "),
    ],
)
def test_blocks_that_are_wrong(server: MockServer, content: Any, message: str) -> None:
    for path in ("/messages", "/messages/count_tokens"):
        given = {"messages": [{"role": "user", "content": content}], "model": "mock"}
        answer = post(server, path, **given, **({"max_tokens": 5} if path == "/messages" else {}))
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_fields_without_effect(client: Anthropic) -> None:
    more = {"metadata": {"user_id": "a"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    message = client.messages.create(
        **asked("Hello.", **more, thinking=thinking), extra_body={"context_management": keep, "top_k": 5}
    )
    assert plain(message) == [{"type": "text", "text": "Hello."}]


def test_keys_and_errors(tokenizer_folder: Path) -> None:
    with serve_mock(tokenizer_folder, server={"port": 0, "api_key": "secret"}) as server:
        base = server.http.removesuffix("/v1")
        question: Any = {"model": "mock", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
        for keys in ({"api_key": "secret"}, {"auth_token": "secret"}):
            with Anthropic(base_url=base, max_retries=0, **keys) as client:
                assert client.messages.create(**question).usage.output_tokens == 3
                with pytest.raises(anthropic.NotFoundError, match="this server has one model: mock"):
                    client.messages.create(**{**question, "model": "other"})
        with Anthropic(base_url=base, max_retries=0, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as raised:
                client.messages.create(**question)
            assert raised.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        headers, path = {"x-api-key": "secret"}, server.http + "/messages"
        large = httpx.post(path, json={"messages": "a" * 2**23}, headers=headers, timeout=60)
        assert large.status_code == 413 and large.json()["error"]["type"] == "request_too_large"
        wrong = httpx.get(server.http + "/messages", headers={"x-api-key": "secret"})
        assert wrong.status_code == 405 and wrong.json()["type"] == "error"


def test_an_engine_that_dies(tokenizer_folder: Path) -> None:
    with serve_mock(tokenizer_folder, server={"port": 0}, seconds=0.02, fail_at=10) as server:
        found = events(
            server, model="mock", max_tokens=50, messages=[{"role": "user", "content": "a long text"}]
        )
        assert found[0][0] == "message_start"
        assert found[-1][0] == "error" and found[-1][1]["error"]["type"] == "overloaded_error"


def test_a_client_that_leaves(tokenizer_folder: Path) -> None:
    with serve_mock(tokenizer_folder, server={"port": 0}, seconds=0.02) as server:
        base: Any = {"base_url": server.http.removesuffix("/v1"), "api_key": "none"}
        with (
            Anthropic(**base) as client,
            client.messages.stream(
                model="mock", max_tokens=900, messages=[{"role": "user", "content": "abc"}]
            ) as stream,
        ):
            next(iter(stream.text_stream))
        server.wait_until_idle()
        assert server.engine.steps < 900


def test_an_aborted_answer(tokenizer_folder: Path) -> None:
    with serve_mock(tokenizer_folder, server={"port": 0}, seconds=0.02) as server:
        body: Any = {"max_tokens": 900, "messages": [{"role": "user", "content": "abc"}], "timeout": 0.2}
        answer = post(server, **body)
        assert answer.status_code == 504 and answer.json()["error"]["type"] == "timeout_error"
        assert events(server, **body)[-1][1]["error"]["type"] == "timeout_error"
