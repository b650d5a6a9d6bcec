"""Tools and histories of the Responses API that other servers know: namespaces, custom tools, hosted tools.
The mock engine repeats its prompt, so the input determines the model's output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jengine import InvalidArgument, StructuredOutputs, Tokenizer
from jengine.serving.http import policy
from jengine.serving.http.parameters import ToolChoice
from jengine.serving.http.responses.body import COMPACTED, INPUT, conversation, read_tools
from jengine.serving.http.responses.types import ITEMS
from tests.serving.conftest import MockServer, serve_mock
from tests.serving.echo import ECHO, serve_echo
from tests.serving.test_call_grammars import accepts
from tests.serving.test_http_responses import EVENT, WEATHER, asked, events, post, raw
from tests.serving.test_http_tools import END
from tests.text.conftest import byte_level, write

READ = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "patch", "description": "Edits files."}
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [READ, PATCH]}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /[a-c]+/"}
REGEX = {"type": "grammar", "syntax": "regex", "definition": "a+|b"}
TOOLS = [WEATHER, FILES, PATCH]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockServer]:
    with serve_echo(tmp_path_factory.mktemp("echo")) as server:
        yield server


def output(server: MockServer, says: str, **options: Any) -> list[dict[str, Any]]:
    """The output, which is the same in a stream."""
    body = raw(asked(says, **{"tools": TOOLS, **options}))
    answer = post(server, **body).json()
    found = events(server, **body)
    for event in found:
        EVENT.validate_python(event)
    streamed = found[-1]["response"]["output"]
    assert [event["item"] for event in found if event["type"].endswith("item.done")] == streamed
    assert [plain(item) for item in streamed] == [plain(item) for item in answer["output"]], answer
    items: list[dict[str, Any]] = answer["output"]
    return items


def plain(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


# --- tools ----------------------------------------------------------------------------------------


def test_what_the_model_sees() -> None:
    tools = read_tools([WEATHER, {"type": "web_search"}, FILES, PATCH], None)
    named = {tool["function"]["name"]: tool["function"] for tool in tools.functions}
    assert list(named) == ["weather", "mcp__files__read", "mcp__files__patch", "patch"]
    assert named["mcp__files__read"]["description"] == "Files."
    assert named["mcp__files__patch"]["description"] == "Edits files."
    assert named["patch"]["parameters"]["required"] == [INPUT] and tools.choice is None
    assert "strict" not in named["weather"] and [tool["type"] for tool in tools.shown] == [
        "function",
        "namespace",
        "custom",
    ]
    described = read_tools([{**PATCH, "format": LARK}], None).functions[0]["function"]["description"]
    assert described == "Edits files.\n\nThe input follows this Lark grammar:\nstart: /[a-c]+/"
    for name in policy.names_after("tools.", policy.RESPONSES, "accepted"):
        assert read_tools([{**READ, name: 1}], None).functions == read_tools([READ], None).functions
        assert read_tools([{**READ, name: 1}], None).shown[0][name] == 1


def test_a_name_twice() -> None:
    for tools in ([READ, READ], [FILES, {**READ, "name": "mcp__files__read"}]):
        with pytest.raises(InvalidArgument, match="another tool has this name"):
            read_tools(tools, None)


def test_hosted_tools_are_left_out(server: MockServer, caplog: pytest.LogCaptureFixture) -> None:
    policy._log_once.cache_clear()
    hosted = [{"type": kind, "a": 1} for kind in policy.names_after("tools: ", policy.RESPONSES, "accepted")]
    with caplog.at_level("INFO", "jengine.serving"):
        answer = post(server, **raw(asked("Hello.", tools=[*hosted, WEATHER]))).json()
    assert [tool["name"] for tool in answer["tools"]] == ["weather"]
    assert caplog.text.count("has no effect: left out of the prompt") == len(hosted)
    answer = post(server, input="a", max_output_tokens=1, tools=hosted).json()
    assert answer["tools"] == []
    for choice in ({"type": "web_search"}, "required"):
        wrong = post(server, input="a", tools=hosted, tool_choice=choice)
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tool_choice"


def test_namespaces(server: MockServer) -> None:
    [item] = output(server, call("mcp__files__read", path="a"))
    assert item["type"] == "function_call" and json.loads(item["arguments"]) == {"path": "a"}
    assert (item["namespace"], item["name"], item["id"][:3]) == ("mcp__files", "read", "fc_")
    [item] = output(server, call("weather"))
    assert item["name"] == "weather" and "namespace" not in item
    [item] = output(server, call("unknown__tool"))
    assert item["name"] == "unknown__tool" and "namespace" not in item


def test_custom_tools(server: MockServer) -> None:
    text = '*** Begin\n"ü"\\n'
    [item] = output(server, call("patch", input=text))
    assert item["type"] == "custom_tool_call" and item["input"] == text and item["id"].startswith("ctc_")
    [item] = output(server, call("mcp__files__patch", input=text))
    assert (item["namespace"], item["name"], item["input"]) == ("mcp__files", "patch", text)
    [item] = output(server, call("patch", diff="a"))  # not the parameter that the model was shown
    assert json.loads(item["input"]) == {"diff": "a"}
    found = events(server, **raw(asked(call("patch", input=text), tools=TOOLS)))
    kinds = [event["type"].removeprefix("response.") for event in found if "output_index" in event]
    inner = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    assert kinds == ["output_item.added", *inner, "output_item.done"]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ('{"input": "abc', "abc"),
        ('{"input": "abc\\', "abc\\"),
        ('{"input": "abc"', '{"input": "abc"'),
        ('{"input": 5}', '{"input": 5}'),
        ("", ""),
        ("[1]", "[1]"),
        ('{"input": "a\\ud83d"}', "a?"),
    ],
)
def test_inputs_that_are_cut_off(arguments: str, expected: str) -> None:
    assert read_tools([PATCH], None).input_of("patch", arguments) == expected


def test_forced_custom_tools(server: MockServer) -> None:
    """The mock engine ignores grammars, so it must write what they force."""
    choice = {"type": "custom", "name": "patch"}
    [item] = output(server, '{"input": "aa"}', tools=[{**PATCH, "format": REGEX}], tool_choice=choice)
    assert item["type"] == "custom_tool_call" and item["input"] == "aa"
    [item] = output(server, "abc", tools=[{**PATCH, "format": LARK}], tool_choice=choice)
    assert item["type"] == "custom_tool_call" and item["input"] == "abc"
    said = '[{"name": "mcp__files__patch", "parameters": {"input": "x"}}]'
    [item] = output(server, said, tool_choice="required")
    assert (item["namespace"], item["name"], item["input"]) == ("mcp__files", "patch", "x")
    wrong = post(
        server,
        input="a",
        tools=[{**PATCH, "format": {**LARK, "definition": "start: ("}}],
        tool_choice=choice,
    )
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tools", wrong.text


@pytest.mark.parametrize("text", ['say "a\n\tb"\n', ""])
def test_a_forced_input_in_channels_is_no_json(text: str, tmp_path: Path) -> None:
    folder = write(byte_level(), tmp_path)
    (folder / "chat_template.jinja").write_text(
        f"{{# <|channel|>analysis #}}{{% if tools %}}{{% endif %}}{ECHO}"
    )
    said = f"<|channel|>commentary to=functions.patch<|message|>{text}<|call|>"
    with serve_mock(folder, server={"port": 0}) as server:
        options = {"tools": [{**PATCH, "format": LARK}], "tool_choice": {"type": "custom", "name": "patch"}}
        [item] = output(server, said, **options)
    assert (item["name"], item["input"]) == ("patch", text)


def test_a_lark_grammar_is_the_whole_input(tokenizer_folder: Path) -> None:
    """Which may follow a thought."""
    tools = read_tools([{**PATCH, "format": LARK}, READ], {"type": "custom", "name": "patch"})
    choice = ToolChoice(tools.functions, tools.functions, "patch", True, grammars=tools.grammars)
    tokenizer = Tokenizer.load(tokenizer_folder)
    assert choice.structure(None) == StructuredOutputs(grammar=LARK["definition"])
    thinks, channels, other = (
        choice.structure(True),
        choice.in_channels(),
        choice._replace(forced="read").structure(True),
    )
    assert accepts(thinks, "hm</think>\n\nabc", tokenizer)
    to = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.patch<|channel|>commentary"
    assert accepts(channels, f"{to}<|message|>abc<|call|>", tokenizer)
    assert not accepts(thinks, "hm</think>\n\nabd", tokenizer)
    assert not accepts(channels, f"{to}<|message|>abd<|call|>", tokenizer)
    assert accepts(other, "hm</think>{}", tokenizer)


def test_a_regular_expression_holds_within_the_arguments(tokenizer_folder: Path) -> None:
    tools = read_tools([{**PATCH, "format": REGEX}], {"type": "custom", "name": "patch"})
    what = StructuredOutputs(json=tools.functions[0]["function"]["parameters"])
    tokenizer = Tokenizer.load(tokenizer_folder)
    assert accepts(what, '{"input": "aaa"}', tokenizer) and accepts(what, '{"input": "b"}', tokenizer)
    assert not accepts(what, '{"input": "ab"}', tokenizer) and not accepts(what, '{"input": "c"}', tokenizer)


def test_allowed_tools(server: MockServer) -> None:
    def allowed(*tools: dict[str, Any], **more: Any) -> list[str]:
        choice = {"type": "allowed_tools", "tools": list(tools), **more}
        return [tool["function"]["name"] for tool in read_tools(TOOLS, choice).functions]

    assert allowed({"type": "function", "name": "weather"}, {"type": "web_search"}) == ["weather"]
    assert allowed({"type": "namespace", "name": "mcp__files"}) == ["mcp__files__read", "mcp__files__patch"]
    assert allowed({"type": "function", "name": "read", "namespace": "mcp__files"}) == ["mcp__files__read"]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    assert read_tools(TOOLS, choice).choice == "required"
    said = '[{"name": "weather", "parameters": {}}]'
    body = raw(asked(said, tools=TOOLS, tool_choice=choice))
    answer = post(server, **body).json()
    assert answer["output"][0]["name"] == "weather" and answer["tool_choice"] == choice
    assert len(answer["tools"]) == 3


def test_at_most_so_many_calls(server: MockServer) -> None:
    says = call("weather") * 3
    assert len(output(server, says)) == 3
    assert len(output(server, says, max_tool_calls=2)) == 2
    assert len(output(server, says, max_tool_calls=2, parallel_tool_calls=False)) == 1


# --- histories ------------------------------------------------------------------------------------


def test_items_of_other_servers() -> None:
    """Each reaches the model, as calls and results."""
    action = {"type": "exec", "command": ["ls"], "env": {}}
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": "a", "phase": None, "more": 1},
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "refusal", "refusal": "no", "more": 1},
                {"type": "output_text", "text": "b"},
            ],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "more": 1},
        {
            "type": "function_call",
            "call_id": "1",
            "name": "read",
            "namespace": "mcp__files",
            "arguments": '{"a',
        },
        {"type": "function_call_output", "call_id": "1", "output": "c", "success": True},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "d", "caller": {}},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "e"}]},
        {"type": "local_shell_call", "id": "lsh", "call_id": "3", "status": "completed", "action": action},
        {"type": "local_shell_call_output", "id": "3", "output": "f"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"query": "g"}},
        {"type": "mcp_call", "id": "mcp", "name": "h", "server_label": "i", "arguments": "{}", "output": "j"},
        {"type": "compaction", "id": "cmp", "encrypted_content": "x"},
    ]
    messages = conversation(items, None)

    def text(message: dict[str, Any]) -> list[str]:
        return [part["text"] for part in message["content"]]

    assert [(message["role"], text(message)) for message in messages] == [
        ("user", ["a"]),
        ("assistant", ["no", "b"]),
        ("assistant", []),
        ("tool", ["c"]),
        ("assistant", []),
        ("tool", ["e"]),
        ("assistant", []),
        ("tool", ["f"]),
        ("assistant", []),
        ("tool", ["completed"]),
        ("assistant", []),
        ("tool", ['{"output": "j"}']),
        ("user", [COMPACTED]),
    ]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    made = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
    assert made == [
        ("1", "mcp__files__read", '{"a'),
        ("2", "patch", '{"input": "d"}'),
        ("3", "local_shell", json.dumps({"action": action})),
        ("ws", "web_search", '{"action": {"query": "g"}}'),
        ("mcp", "mcp", '{"name": "h", "server_label": "i", "arguments": "{}"}'),
    ]
    assert messages[2]["reasoning_content"] == "hm"


def test_the_table_of_items() -> None:
    rules = policy.RESPONSES
    accepted = policy.names_after("input: ", rules, "applied") | policy.names_after(
        "input: ", rules, "accepted"
    )
    assert accepted == set(ITEMS) and not policy.names_after("input: ", rules, "error") & set(ITEMS)


def test_a_call_that_was_cut_off_goes_back(server: MockServer) -> None:
    """The conversation goes on after a call whose arguments are no JSON."""
    items = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "K'},
        {"type": "function_call_output", "call_id": "1", "output": "invalid arguments"},
        {"role": "user", "content": "Hello." + END},
    ]
    answer = post(server, **{**raw(asked("", tools=TOOLS)), "input": items})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["content"][0]["text"].endswith("invalid argumentsHello.")
