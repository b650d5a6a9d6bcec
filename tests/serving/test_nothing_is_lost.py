"""A conversation with a marker in each field, in each API and given to each template: the prompt has every
marker, or an error names the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jengine import InvalidArgument, chat_prompt
from jengine.api.chat import rendered_chat
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.conversions import to_messages, to_options
from jengine.serving.http.bodies import CHAT
from jengine.serving.http.messages import body as messages_body
from jengine.serving.http.responses import body as responses_body
from tests.serving.conftest import MockServer, serve_mock
from tests.serving.test_tool_conversations import TEMPLATES, tokenizer_with
from tests.text import tool_templates
from tests.text.conftest import byte_level, write

Prompted = tuple[list[dict[str, Any]], list[dict[str, Any]]]  # messages and tools, as for `chat_prompt`
FUNCTION: dict[str, Any] = {
    "name": "mtool",
    "description": "mdescription",
    "parameters": {
        "type": "object",
        "properties": {"mkey": {"type": "string", "description": "mhint", "enum": ["mvalue", "mother"]}},
    },
}
OF_TOOLS = ["mtool", "mdescription", "mkey", "mhint", "mother"]
CUT = '{"mcut'  # the arguments of a call that was cut off
OLD, CURRENT = "moldthought", "mthought"  # reasoning before the last question, and after it


def text(value: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": value}


def call(number: int, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "mtool", "arguments": arguments},
    }


def chat_messages() -> list[dict[str, Any]]:
    """Results come in another order than their calls."""
    return [
        {"role": "system", "content": "msystem", "name": "msystemname"},
        {"role": "developer", "content": [text("mdeveloper")], "name": "mdevelopername"},
        {"role": "user", "content": "mquestion", "name": "musername"},
        {
            "role": "assistant",
            "content": [text("manswer"), {"type": "refusal", "refusal": "mrefusalpart"}],
            "refusal": "mrefusal",
            "name": "massistantname",
            "reasoning_content": OLD,
        },
        {"role": "user", "content": [text("mfirst"), text("msecond")]},
        {
            "role": "assistant",
            "content": "mlook",
            "reasoning": CURRENT,
            "tool_calls": [call(1, '{"mkey": "mvalue"}'), call(2, CUT)],
        },
        {"role": "tool", "tool_call_id": "call_2", "content": [text("mresult2a"), text("mresult2b")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "mresult1", "name": "mresultname"},
        {"role": "system", "content": "mreminder"},
    ]


CHAT_MARKS = ["msystem", "msystemname", "mdeveloper", "mdevelopername", "mquestion", "musername", "manswer"]
CHAT_MARKS += ["mrefusalpart", "mrefusal", "massistantname", "mfirst", "msecond", "mlook", "mvalue", "mcut"]
CHAT_MARKS += ["mresult1", "mresultname", "mresult2a", "mresult2b", "mreminder", *OF_TOOLS]


def of_chat() -> Prompted:
    tools = [{"type": "function", "function": FUNCTION}]
    body = CHAT.read({"model": "m", "messages": chat_messages(), "tools": tools})
    return body.get("messages"), body.get("tools")


def of_library() -> Prompted:
    return chat_messages(), [{"type": "function", "function": FUNCTION}]


def of_grpc() -> Prompted:
    given = []
    for message in chat_messages():
        content = message["content"]
        parts = [part.get("text") or part["refusal"] for part in content] if isinstance(content, list) else []
        sent = pb.ChatMessage(
            role=message["role"],
            parts=[pb.ContentPart(text=part) for part in parts],
            **{name: message[name] for name in ("name", "tool_call_id") if name in message},
        )
        if not parts:
            sent.content = content
        if "tool_calls" in message:
            sent.tool_calls_json = json.dumps(message["tool_calls"])
        given.append(sent)
    options = pb.ChatOptions(tools_json=json.dumps([{"type": "function", "function": FUNCTION}]))
    return to_messages(given), to_options(options)["tools"]


def of_responses() -> Prompted:
    output = [text("mresult2a", "input_text"), text("mresult2b", "input_text")]
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "system", "content": "msystem"},
        {"role": "developer", "content": [text("mdeveloper", "input_text")]},
        {"role": "user", "content": "mquestion"},
        {"type": "reasoning", "summary": [], "content": [text(OLD, "reasoning_text")]},
        {"type": "message", "role": "assistant", "content": [text("manswer", "output_text")]},
        {"role": "user", "content": [text("mfirst", "input_text"), text("msecond", "input_text")]},
        {"type": "reasoning", "summary": [text(CURRENT, "summary_text")]},
        {"type": "function_call", "call_id": "1", "name": "mtool", "arguments": '{"mkey": "mvalue"}'},
        {"type": "message", "role": "assistant", "content": [text("mlook", "output_text")]},
        {"type": "function_call", "call_id": "2", "name": "mtool", "arguments": CUT},
        {"type": "function_call_output", "call_id": "2", "output": output},
        {"type": "function_call_output", "call_id": "1", "output": "mresult1"},
        {"role": "system", "content": "mreminder"},
    ]
    tools = [{"type": "function", **FUNCTION}]
    given = {"model": "m", "input": items, "instructions": "minstructions", "tools": tools, "store": False}
    body = responses_body.read(given).body
    return body.get("messages"), body.get("tools")


def of_messages() -> Prompted:
    result = [text("mresult2a"), text("mresult2b")]
    said: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": CURRENT, "signature": "x"},
        text("mlook"),
        {"type": "tool_use", "id": "1", "name": "mtool", "input": {"mkey": "mvalue"}},
        {"type": "tool_use", "id": "2", "name": "mtool", "input": {"mkey": "mcut"}},
    ]
    given = {
        "model": "m",
        "max_tokens": 5,
        "system": [text("msystem"), text("mdeveloper")],
        "messages": [
            {"role": "user", "content": "mquestion"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": OLD}, text("manswer")]},
            {"role": "user", "content": [text("mfirst"), text("msecond")]},
            {"role": "assistant", "content": said},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "2", "content": result, "is_error": True},
                    {"type": "tool_result", "tool_use_id": "1", "content": "mresult1"},
                ],
            },
        ],
        "tools": [
            {
                "name": "mtool",
                "description": "mdescription",
                "input_schema": FUNCTION["parameters"],
            }
        ],
    }
    body = messages_body.read(given).body
    return body.get("messages"), body.get("tools")


COMMON = [mark for mark in CHAT_MARKS if "name" not in mark and "refusal" not in mark]
APIS: dict[str, tuple[Callable[[], Prompted], list[str]]] = {
    "chat": (of_chat, CHAT_MARKS),
    "library": (of_library, CHAT_MARKS),
    "grpc": (of_grpc, [mark for mark in CHAT_MARKS if mark != "mrefusal"]),  # it has no such field
    "responses": (of_responses, [*COMMON, "minstructions"]),
    "messages": (of_messages, [mark for mark in [*COMMON, "Error:"] if mark != "mreminder"]),
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_markers(name: str, api: str) -> None:
    """What the documentation lists is left out: reasoning that a template does not show, and text beside
    calls of a turn that goes on, where turns must alternate.
    """
    tokenizer = tokenizer_with(TEMPLATES[name])
    traits = tokenizer.chat_templates["default"].traits
    make, marks = APIS[api]
    messages, tools = make()
    prompt = chat_prompt(tokenizer, messages, tools=tools)["prompt"]
    later = traits.text_of_calls == "later" and traits.calls
    missing = {mark for mark in marks if mark not in prompt}
    assert missing == ({"mlook"} if later else set()), prompt
    if api != "grpc":  # it has no reasoning
        assert (CURRENT in prompt) == (traits.reasoning is not None), prompt
    assert prompt.index("mresult1") < prompt.index("mresult2a") < prompt.index("mresult2b")
    assert "None" not in prompt


@pytest.mark.parametrize("name", TEMPLATES)
def test_reasoning_before_an_answer(name: str) -> None:
    """It is shown as the template does, under whichever name it comes, and never as another text."""
    tokenizer = tokenizer_with(TEMPLATES[name])
    shown = []
    for field in ("reasoning_content", "reasoning", "thinking"):
        said = {"role": "assistant", "content": "manswer", field: OLD}
        asked = {"role": "user", "content": "mquestion"}
        shown.append(chat_prompt(tokenizer, [asked, said, asked])["prompt"])
    assert shown[0] == shown[1] == shown[2] and "manswer" in shown[0]
    plain = chat_prompt(tokenizer, [asked, {"role": "assistant", "content": "manswer"}, asked])["prompt"]
    assert OLD in shown[0] or shown[0] == plain


@pytest.mark.parametrize(
    "message, field",
    [
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "audio"),
        ({"role": "assistant", "content": "x", "prefix": True}, "prefix"),
        ({"role": "user", "content": "x", "tool_calls": [call(1, "")]}, "tool_calls"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "tool_call_id"),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "reasoning_content"),
        ({"role": "assistant", "content": "x", "reasoning": {"a": 1}}, "reasoning"),
        ({"role": "user", "content": "x", "name": 5}, "name"),
        ({"role": "assistant", "tool_calls": 3}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [3]}, "tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, "tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}, "tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f", "input": ""}}]},
            "tool_calls[0].type",
        ),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "content[0]"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "content[0]"),
    ],
)
def test_what_is_not_shown_is_an_error(message: dict[str, Any], field: str) -> None:
    tokenizer = tokenizer_with(tool_templates.QWEN_3)
    with pytest.raises(InvalidArgument) as wrong:
        chat_prompt(tokenizer, [{"role": "user", "content": "x"}, message])
    assert wrong.value.field == f"messages[1].{field}"


def test_two_kinds_of_reasoning_are_an_error() -> None:
    said = {"role": "assistant", "content": "", "reasoning": "a", "thinking": "b"}
    with pytest.raises(InvalidArgument, match=r"messages\[0\]=.*only one of these"):
        chat_prompt(tokenizer_with(tool_templates.QWEN_3), [said])


def test_what_clients_send_back_with_an_answer_is_accepted() -> None:
    said = {"role": "assistant", "content": "manswer", "annotations": [{"type": "url"}], "audio": None}
    said |= {"tool_calls": [], "function_call": None, "refusal": "", "id": "1", "prefix": False}
    asked = [{"role": "user", "content": "x"}]
    plain = chat_prompt(tokenizer_with(tool_templates.QWEN_3), [*asked, {**asked[0], "content": "manswer"}])
    prompt = chat_prompt(tokenizer_with(tool_templates.QWEN_3), [*asked, said])["prompt"]
    assert prompt == plain["prompt"].replace("user\nmanswer", "assistant\nmanswer")


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_images_keep_their_place(name: str, role: str) -> None:
    parts: list[dict[str, Any]] = [text("mbefore"), {"type": "image"}, text("mafter")]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "msystem"},
        {"role": "user", "content": "mquestion"},
        {"role": "assistant", "content": None, "tool_calls": [call(1, "{}")]},
        {"role": role, "content": parts, **({"tool_call_id": "call_1"} if role == "tool" else {})},
    ]
    prompt, _ = rendered_chat(tokenizer_with(TEMPLATES[name]), messages, marker="<|image_pad|>")
    assert prompt.index("mbefore") < prompt.index("<|image_pad|>") < prompt.index("mafter")


def test_an_error_of_the_template_names_the_message() -> None:
    """Where a conversation begins to be refused."""
    tokenizer = tokenizer_with(
        "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('never') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    for size in (1, 2, 5, 9):
        for bad in range(size):
            messages = [{"role": "user", "content": "bad" if i == bad else f"m{i}"} for i in range(size)]
            for options in ({}, {"continue_final_message": True}, {"tools": [{"function": FUNCTION}]}):
                with pytest.raises(InvalidArgument, match=rf"messages\[{bad}\]=.*'bad'.*rejects it: never"):
                    chat_prompt(tokenizer, messages, **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockServer]:
    folder: Path = write(byte_level(), tmp_path_factory.mktemp("markers"))
    (folder / "chat_template.jinja").write_text(tool_templates.QWEN_VL)
    with serve_mock(folder, server={"port": 0}) as server:
        yield server
        server.wait_until_idle()


def test_every_service_has_the_same_prompt(server: MockServer) -> None:
    """The mock engine repeats its prompt."""
    instructions = [{"role": "system", "content": "msystem"}, {"role": "developer", "content": "mdeveloper"}]
    asked = {"role": "user", "content": "mquestion"}
    chat = {"messages": [*instructions, asked], "max_tokens": 300}
    responses = {"input": [instructions[1], asked], "instructions": "msystem", "max_output_tokens": 300}
    anthropic = {"messages": [asked], "system": "msystem", "max_tokens": 300}
    answers = {
        path: httpx.post(f"{server.http}/{path}", json={"model": "mock", **body}, timeout=60).json()
        for path, body in (("chat/completions", chat), ("responses", responses), ("messages", anthropic))
    }
    said = [
        answers["chat/completions"]["choices"][0]["message"]["content"],
        answers["responses"]["output"][0]["content"][0]["text"],
    ]
    block = answers["messages"]["content"][0]["text"]  # the API has no developers
    assert "msystem" in block and "mquestion" in block
    base = server.http.removesuffix("/v1")
    tokens = httpx.post(f"{base}/tokenize", json={"messages": chat["messages"]}, timeout=60).json()["tokens"]
    prompt = httpx.post(f"{base}/detokenize", json={"tokens": tokens}, timeout=60).json()["prompt"]
    assert all(mark in prompt for mark in ("msystem", "mdeveloper", "mquestion"))
    request = pb.ChatRequest(messages=[pb.ChatMessage(**message) for message in chat["messages"]])
    request.sampling_params.max_tokens = 300
    with server.stub() as stub:
        said.append(stub.Chat(request, timeout=60).completions[0].text)
    assert [text_said[: len(prompt)] for text_said in said] == [prompt] * 3
