"""OpenAI's Responses API with its client. The mock engine repeats its prompt, so the input determines the
model's output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import TypeAdapter

from jengine import InvalidArgument, Tokenizer
from jengine.serving.calls.errors import Busy
from jengine.serving.http import policy
from tests.serving.conftest import MockServer, serve_mock
from tests.serving.echo import serve_echo
from tests.serving.test_http_tools import CALL, END, SAID

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
THOUGHT = "<think>\nHm, the weather.\n</think>\n\n"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


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
    return {
        "model": "mock",
        "input": says + END,
        "max_output_tokens": 500,
        "extra_body": {"stop": [END]},
        **options,
    }


def raw(body: dict[str, Any]) -> dict[str, Any]:
    """A request as the client sends it."""
    return {**{name: body[name] for name in body if name != "extra_body"}, **body["extra_body"]}


def streamed(client: OpenAI, **body: Any) -> Any:
    with client.responses.stream(**body) as stream:
        return stream.get_final_response()


def plain(response: Any) -> list[dict[str, Any]]:
    """The output without its ids."""
    items = [item.model_dump(exclude_none=True) for item in response.output]
    hidden = ("id", "call_id", "parsed_arguments")
    return [{name: value for name, value in item.items() if name not in hidden} for item in items]


def post(server: MockServer, path: str = "/responses", **body: Any) -> httpx.Response:
    return httpx.post(server.http + path, json=body, timeout=60)


def test_text(client: OpenAI) -> None:
    response = client.responses.create(**asked("Hello.", instructions="", metadata={"a": "b"}))
    assert response.output_text == "Hello." and response.status == "completed"
    assert response.metadata == {"a": "b"} and response.store is True and response.max_output_tokens == 500
    usage = response.usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    counted = client.responses.input_tokens.count(model="mock", input="Hello." + END)
    assert counted.input_tokens == usage.input_tokens
    again = client.responses.create(**asked("Hello. " * 10)), client.responses.create(**asked("Hello. " * 10))
    assert again[1].usage is not None and again[1].usage.input_tokens_details.cached_tokens >= 16
    short = client.responses.create(**asked("Hello.", max_output_tokens=2))
    assert short.status == "incomplete" and short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens" and short.output[0].status == "incomplete"


def test_a_streamed_text(client: OpenAI) -> None:
    text = ""
    for event in client.responses.create(**asked("Hello."), stream=True):
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == "Hello."
    answer = streamed(client, **asked("Hello."))
    assert answer.output_text == "Hello." and answer.usage.output_tokens > 0


def test_reasoning_and_a_call(client: OpenAI) -> None:
    body = asked(THOUGHT + "It rains.\n" + CALL, tools=[WEATHER])
    response = client.responses.create(**body)
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert reasoning.content[0].text == "Hm, the weather." and response.output_text == "It rains."
    assert call.type == "function_call" and call.name == "weather" and message.type == "message"
    assert json.loads(call.arguments) == {"city": "Köln"} and call.call_id.startswith("call_")
    usage = response.usage
    assert usage is not None and 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    answer = streamed(client, **body)
    assert [item["type"] for item in plain(answer)] == ["reasoning", "message", "function_call"]
    assert plain(answer)[0] == plain(response)[0] and plain(answer)[2] == plain(response)[2]


@pytest.mark.parametrize("error", [Busy("full", 1.0), InvalidArgument("prompt", "", "is too long")])
def test_tokens_that_cannot_be_counted(
    client: OpenAI, server: MockServer, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished answer counts more."""
    encode = Tokenizer.encode

    def failing(tokenizer: Tokenizer, text: str, *options: Any) -> list[int]:
        if text == "Hm, the weather.":
            raise error
        return encode(tokenizer, text, *options)

    monkeypatch.setattr(Tokenizer, "encode", failing)
    for answer in (client.responses.create(**asked(THOUGHT + "x")), streamed(client, **asked(THOUGHT + "x"))):
        assert answer.output_text == "x" and answer.usage.output_tokens_details.reasoning_tokens == 0
    body: Any = {"model": "mock", "max_tokens": 200, "stop_sequences": [END]}
    body["messages"] = [{"role": "user", "content": f"{THOUGHT}x{END}"}]
    whole = httpx.post(f"{server.http}/messages", json=body, timeout=60).json()
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 0}


def test_an_agent(client: OpenAI) -> None:
    """The client's own objects go back as they came."""
    question = {"role": "user", "content": THOUGHT + CALL + END}
    output = client.responses.create(**asked("", input=[question], tools=[WEATHER])).output
    result = {"type": "function_call_output", "call_id": output[-1].call_id, "output": "rain"}
    more = {"role": "user", "content": [{"type": "input_text", "text": "It rains." + END}]}
    body = asked("", input=[*output, result, more], tools=[WEATHER])
    for answer in (client.responses.create(**body), streamed(client, **body)):
        assert answer.output_text == SAID + "rainIt rains."


def test_calls(client: OpenAI) -> None:
    def count(**options: Any) -> list[int]:
        body = asked(CALL + CALL, tools=[WEATHER], **options)
        answers = client.responses.create(**body), streamed(client, **body)
        return [sum(item.type == "function_call" for item in answer.output) for answer in answers]

    assert count() == [2, 2]
    assert count(parallel_tool_calls=False) == [1, 1]
    assert count(tool_choice="none") == [0, 0]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_forced_calls(client: OpenAI, choice: Any) -> None:
    """The mock engine ignores grammars, so it must write the calls' form itself."""
    says = '[{"name": "weather", "parameters": {"city": "Köln"}}]'
    says = says if choice == "required" else '{"city": "Köln"}'
    body = asked(says, tools=[WEATHER], tool_choice=choice)
    for answer in (client.responses.create(**body), streamed(client, **body)):
        [call] = answer.output
        assert call.name == "weather" and json.loads(call.arguments) == {"city": "Köln"}


def test_what_the_template_gets(client: OpenAI) -> None:
    said = client.responses.create(
        **asked(" work", reasoning={"effort": "high", "summary": "auto"}, instructions="Hi. ")
    )
    assert said.output_text == "highHi.  work"
    items = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b" + END}]
    assert client.responses.create(**asked("", input=items)).output_text == "ab"
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    for text in ({"format": form}, {"format": {"type": "json_object"}}, {"format": {"type": "text"}}):
        answer = client.responses.create(**asked("{}", text=text))  # type: ignore[arg-type]
        assert answer.output_text == "{}" and answer.text is not None and answer.text.format is not None
        assert answer.text.format.type == text["format"]["type"]


def events(server: MockServer, **body: Any) -> list[dict[str, Any]]:
    """The data of events, as they are sent."""
    text = post(server, **{**body, "stream": True}).text
    found = []
    for number, event in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}" and found[-1]["sequence_number"] == number
    return found


def test_the_order_of_events(server: MockServer) -> None:
    body = asked(THOUGHT + "It rains.\n" + CALL, tools=[WEATHER])
    found = events(server, **raw(body))
    for event in found:
        EVENT.validate_python(event)
    expected: list[tuple[str, int | None]] = [("created", None), ("in_progress", None)]
    for index, kind in enumerate(("reasoning_text", "output_text", "function_call_arguments")):
        inner = ["content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done"]
        inner = inner[1:3] if index == 2 else inner
        expected += [(name, index) for name in ("output_item.added", *inner, "output_item.done")]
    expected.append(("completed", None))
    order = [(event["type"].removeprefix("response."), event.get("output_index")) for event in found]
    assert list(dict.fromkeys(order)) == expected
    last = found[-1]["response"]
    assert last["output"] == [event["item"] for event in found if event["type"].endswith("item.done")]
    deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == last["output"][1]["content"][0]["text"]


def test_a_whole_response_has_its_schema(server: MockServer) -> None:
    body = asked(THOUGHT + CALL, tools=[WEATHER], text={"format": {"type": "text"}})
    answer = post(server, **raw(body)).json()
    Response.model_validate(answer, strict=True)
    assert answer["tools"] == [{**WEATHER, "description": None}] and answer["previous_response_id"] is None


@pytest.mark.parametrize(
    "options, param",
    [
        ({"input": None}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call", "call_id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "a"}]}, "input[0].input"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": 0}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "a"}, "conversation"),
        ({"prompt": {"id": "a"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": ["message.output_text.logprobs", "everything"]}, "include[1]"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "a"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "a"}}]}, "tools[0].format"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [WEATHER, {"type": "mcp"}], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp"}]}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "a"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"nothing": 1}, "nothing"),
    ],
)
def test_what_is_wrong(server: MockServer, options: dict[str, Any], param: str) -> None:
    answer = post(server, **{"model": "mock", "input": "a", **options})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_what_codex_sends(server: MockServer) -> None:
    """Codex's instructions come as `developer` messages, its MCP servers as namespaces."""
    shell = {**WEATHER, "name": "exec_command", "strict": False, "output_schema": {"type": "object"}}
    member = {"type": "function", "name": "spawn_agent", "parameters": {"type": "object", "properties": {}}}
    patch = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
    tools = [
        shell,
        {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [member]},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": patch},
        {"type": "web_search", "external_web_access": False},
    ]
    context = {"type": "input_text", "text": ""}
    answer = post(
        server,
        model="mock",
        max_output_tokens=500,
        stop=[END],
        instructions="",
        tools=tools,
        input=[
            {"type": "message", "role": "developer", "content": [context]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello." + END}]},
        ],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "concise", "context": "all_turns"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="a",
        client_metadata={"x-codex-installation-id": "b"},
        text={"verbosity": "low"},
        service_tier="priority",
    ).json()
    assert answer["output"][0]["content"][0]["text"] == "lowHello." and not answer["store"], answer
    assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace", "custom"]
    assert answer["service_tier"] == "default" and answer["prompt_cache_key"] == "a"


def test_fields_follow_the_policy(server: MockServer, caplog: pytest.LogCaptureFixture) -> None:
    """Each field of the API is in the table, and has the outcome that the table says."""
    table = set().union(*policy.RESPONSES.values())
    listed = {name.partition(".")[0].partition(":")[0] for name in table}
    assert get_type_hints(ResponseCreateParamsBase).keys() | {"stream"} <= listed
    policy._log_once.cache_clear()
    body = {"input": "a", "max_output_tokens": 1}
    values = {"user": "a", "safety_identifier": "a", "prompt_cache_key": "a"}
    with caplog.at_level("INFO", "jengine.serving"):
        for name in policy.fields(policy.RESPONSES, "accepted"):
            given = {name: values.get(name, {"a": 1})}
            for _ in range(2):
                assert post(server, **body, **given).status_code == 200, name
            assert caplog.text.count(f"{name} has no effect") == 1
    for name in policy.fields(policy.RESPONSES, "error"):
        answer = post(server, **body, **{name: "auto"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name, name
        assert policy.RESPONSES["error"][name] in answer.json()["error"]["message"]
        assert post(server, **body, **{name: None}).status_code == 200, name


def test_log_probabilities(client: OpenAI, server: MockServer) -> None:
    """Those of a message's tokens: not of the reasoning, of a call, or of the text of the stop string."""
    include: Any = ["message.output_text.logprobs"]
    body = asked(THOUGHT + "It rains, ü.\n" + CALL, tools=[WEATHER], include=include, top_logprobs=2)
    whole = client.responses.create(**body)
    message = whole.output[1]
    assert message.type == "message" and message.content[0].type == "output_text"
    entries = message.content[0].logprobs
    assert entries is not None and len(entries) > 3 and whole.top_logprobs == 2
    joined = b"".join(bytes(entry.bytes) for entry in entries)
    assert joined.decode() == message.content[0].text == "It rains, ü."
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)
    found = events(server, **raw(body))
    for event in found:
        EVENT.validate_python(event)
    shown = {
        kind: [event for event in found if event["type"].endswith(kind)]
        for kind in ("text.delta", "text.done")
    }
    deltas = [entry for event in shown["text.delta"] for entry in event.get("logprobs", ())]
    assert [entry["token"] for entry in deltas] == [entry.token for entry in entries]
    [done] = [event for event in shown["text.done"] if "logprobs" in event]
    assert done["logprobs"] == deltas == found[-1]["response"]["output"][1]["content"][0]["logprobs"]
    [message] = client.responses.create(**asked("Hello.", include=include)).output
    assert b"".join(bytes(entry.bytes) for entry in message.content[0].logprobs) == b"Hello."  # type: ignore


def test_a_websocket_and_compaction(server: MockServer) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    answer = httpx.get(server.http + "/responses", headers=upgrade, timeout=60)
    assert answer.status_code == 426 and "no WebSocket" in answer.json()["error"]["message"]
    assert httpx.get(server.http + "/responses", timeout=60).status_code == 405
    answer = post(server, "/responses/compact", input="a")
    assert answer.status_code == 404 and "compacts no conversations" in answer.json()["error"]["message"]


def test_an_engine_that_dies(tokenizer_folder: Path) -> None:
    options: Any = {"server": {"port": 0}, "seconds": 0.02, "fail_at": 10}
    with serve_mock(tokenizer_folder, **options) as server:
        found = events(server, input="a long text")
        assert found[0]["type"] == "response.created" and found[-1]["type"] == "response.failed"
        EVENT.validate_python(found[-1])


def test_an_aborted_response(tokenizer_folder: Path) -> None:
    with serve_mock(tokenizer_folder, server={"port": 0}, seconds=0.02) as server:
        body: Any = {"input": "abc", "max_output_tokens": 900, "timeout": 0.2}
        whole, answer = post(server, **body), events(server, **body)[-1]["response"]
        assert whole.status_code == 504 and "timeout" in whole.json()["error"]["message"]
        assert answer["status"] == "failed" and "timeout" in answer["error"]["message"]
        assert answer["output"][0]["status"] == "incomplete" and answer["usage"]["output_tokens"] > 0
