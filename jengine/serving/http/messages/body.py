"""Reads the bodies of /v1/messages and /v1/messages/count_tokens. Their types have the parts of Anthropic's
requests that work here; the API's own types have no others.
"""

from __future__ import annotations

from typing import Any, Literal, Required

from jengine import InvalidArgument
from jengine.serving.grpc.conversions import check_messages
from jengine.serving.http import policy
from jengine.serving.http.bodies import (
    LEVEL,
    Body,
    BodyFields,
    Level,
    Strict,
    checked,
    validator_of,
    without_nulls,
)
from jengine.serving.http.chat_service import ChatInput
from jengine.serving.http.parameters import thinking_variables
from jengine.serving.http.turns import Turns, image, text, type_of


class CacheControl(Strict, total=False):
    """Marks of caching: any object. Prefixes are cached without them."""

    cache_control: dict[str, Any]


class Text(CacheControl, total=False):
    type: Required[Literal["text"]]
    text: Required[str]


class Base64Image(Strict):
    type: Literal["base64"]
    media_type: str
    data: str


class UrlImage(Strict):
    type: Literal["url"]
    url: str


class Image(CacheControl, total=False):
    type: Required[Literal["image"]]
    source: Required[Base64Image | UrlImage]


class Thinking(Strict, total=False):
    type: Required[Literal["thinking"]]
    thinking: Required[str]
    signature: str


class DirectCaller(Strict):
    type: Literal["direct"]


class ToolUse(CacheControl, total=False):
    type: Required[Literal["tool_use"]]
    id: Required[str]
    name: Required[str]
    input: Required[dict[str, Any]]
    caller: DirectCaller


class ToolResult(CacheControl, total=False):
    type: Required[Literal["tool_result"]]
    tool_use_id: Required[str]
    content: str | list[dict[str, Any]]
    is_error: bool


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Tool(CacheControl, total=False):
    type: Literal["custom"]
    name: Required[str]
    input_schema: Required[dict[str, Any]]
    description: str
    strict: bool
    eager_input_streaming: bool
    defer_loading: Literal[False]


class ToolChoice(Strict, total=False):
    type: Required[Literal["auto", "any", "tool", "none"]]
    name: str
    disable_parallel_tool_use: bool


class ThinkingConfig(Strict, total=False):
    type: Required[Literal["enabled", "adaptive", "disabled"]]
    budget_tokens: int
    display: Literal["summarized", "omitted"]


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Strict, total=False):
    effort: Literal["low", "medium", "high", "xhigh", "max"]
    format: OutputFormat


class KeepThinking(Strict):
    """What happens anyway."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Strict):
    edits: list[KeepThinking]


class Prompt(CacheControl, total=False):
    """What the prompt depends on: /v1/messages/count_tokens."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]]
    tools: list[dict[str, Any]]
    tool_choice: ToolChoice
    thinking: ThinkingConfig
    output_config: OutputConfig
    context_management: ContextManagement


class MessagesBody(Prompt, Level, total=False):
    """/v1/messages."""

    stop_sequences: list[str]


MESSAGE, TOOL = validator_of(Message), validator_of(Tool)
BLOCKS = {
    "text": validator_of(Text),
    "image": validator_of(Image),
    "thinking": validator_of(Thinking),
    "tool_use": validator_of(ToolUse),
    "tool_result": validator_of(ToolResult),
}
# blocks of messages by role, of `system`, and of a tool's result
PLACES = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
    "result": ("text", "image"),
}


IGNORED, REFUSED = (policy.fields(policy.MESSAGES, outcome) for outcome in ("accepted", "error"))
FORM = BodyFields(MessagesBody, ignored=IGNORED, refused=REFUSED)
COUNT = BodyFields(Prompt, sampling=False, ignored=IGNORED, refused=REFUSED)
NAMES = {"prompt": "messages", "stop": "stop_sequences", "tool_choice": "tool_choice"}
NAMES["thinking_budget"] = "thinking.budget_tokens"
INPUT = frozenset(("input",))  # of a tool, in which null has a meaning


def read(json_body: dict[str, Any]) -> ChatInput:
    """Raises InvalidArgument, naming the field."""
    policy.check_fields(policy.MESSAGES, json_body, {})
    policy.log_accepted("/v1/messages", json_body)
    body = FORM.read(json_body)
    if "max_tokens" not in body.sampling:
        raise InvalidArgument("max_tokens", None, "must be given")
    sampling = dict(body.sampling)
    if "stop_sequences" in body.fields:
        sampling["stop"] = body.fields["stop_sequences"]
    return _chat_input(body.fields, sampling)


def read_to_count(json_body: dict[str, Any]) -> ChatInput:
    """The body of a request whose prompt is counted. Raises as `read`."""
    return _chat_input(COUNT.read(json_body).fields, {})


def _chat_input(request: dict[str, Any], sampling: dict[str, Any]) -> ChatInput:
    if not request.get("messages"):
        raise InvalidArgument("messages", request.get("messages"), "must have at least one message")
    messages = conversation(request["messages"], request.get("system"))
    fields = {
        **{name: request[name] for name in LEVEL if name in request},
        "messages": messages,
        **_tools(request.get("tools", []), request.get("tool_choice")),
        **_thinking(request.get("thinking"), sampling.get("max_tokens")),
    }
    if messages[-1]["role"] == "assistant":
        fields["continue_final_message"] = True
    names, config = dict(NAMES), request.get("output_config", {})
    if "effort" in config:
        fields["reasoning_effort"] = config["effort"]
    if "format" in config:
        schema = {"name": "answer", "schema": config["format"]["schema"]}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        names |= {"structured_outputs": "output_config.format", "response_format": "output_config.format"}
    if request.get("tool_choice", {}).get("type") in ("any", "tool"):
        names["structured_outputs"] = "tools"
    return ChatInput(Body(fields, sampling), names, request)


def _tools(tools: list[dict[str, Any]], choice: dict[str, Any] | None) -> dict[str, Any]:
    """The tools and their choice, as fields of a chat's body."""
    fields: dict[str, Any] = {}
    if tools:
        fields["tools"] = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    if choice is None:
        return fields
    kind, name = choice["type"], choice.get("name")
    if kind in ("any", "tool") and not tools:
        raise InvalidArgument("tool_choice.type", kind, "needs tools")
    if (kind == "tool") != (name is not None):
        raise InvalidArgument("tool_choice.name", name, f"must {'' if kind == 'tool' else 'not '}be given")
    fields["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    fields["tool_choice"] = (
        {"type": "function", "function": {"name": name}}
        if kind == "tool"
        else {"any": "required"}.get(kind, kind)
    )
    return fields


def _tool(where: str, tool_body: dict[str, Any]) -> dict[str, Any]:
    kind = tool_body.get("type")
    if kind not in (None, "custom"):
        raise InvalidArgument(f"{where}.type", kind, policy.MESSAGES["error"]["tools.type"])
    tool = checked(TOOL, tool_body, where)
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if name in tool}
    return {"type": "function", "function": function}


def _thinking(config: dict[str, Any] | None, max_tokens: Any) -> dict[str, Any]:
    """What the field says about thinking, as fields of a chat's body.

    Args:
        max_tokens: None if tokens are only counted.
    """
    if config is None:
        return {}
    fields: dict[str, Any] = {}
    if (budget := config.get("budget_tokens")) is not None:
        if config["type"] != "enabled":
            raise InvalidArgument("thinking.budget_tokens", budget, "is only for enabled")
        if budget < 0:
            raise InvalidArgument("thinking.budget_tokens", budget, "must be at least 0")
        if isinstance(max_tokens, int) and budget < max_tokens:  # otherwise max_tokens bounds it
            fields["thinking_budget"] = budget
    if config["type"] != "adaptive":
        fields["chat_template_kwargs"] = thinking_variables(config["type"] == "enabled")
    if config.get("display") == "omitted":
        fields["include_reasoning"] = False
    return fields


def conversation(messages: list[Any], system: Any) -> list[dict[str, Any]]:
    """The messages, and the system prompt first. Neighbouring messages of one role are joined.

    Raises:
        InvalidArgument: a message or block is invalid, or not supported; naming it.
    """
    check_messages(messages)
    turns = Turns(joins=True)
    if system is not None:
        turns.add("system", _parts("system", system, "system"))
    for i, message_body in enumerate(messages):
        where = f"messages[{i}]"
        present = {name: value for name, value in message_body.items() if value is not None}
        message = checked(MESSAGE, present, where)
        for block in _blocks(f"{where}.content", message["content"], message["role"]):
            _add(turns, message["role"], block)
    if not any(message["role"] != "system" for message in turns.messages):
        raise InvalidArgument("messages", None, "must have a message with content")
    if "tool_calls" in turns.messages[-1]:
        raise InvalidArgument("messages", None, "must have a tool_result after tool_use")
    return turns.messages


def _add(turns: Turns, role: Any, block: dict[str, Any]) -> None:
    match block["type"]:
        case "text" | "image":
            turns.add(role, [block["part"]])
        case "thinking":
            turns.reasoning(block["thinking"])
        case "tool_use":
            turns.call(block["id"], block["name"], block["input"])
        case "tool_result":
            turns.result(block["tool_use_id"], block["content"])


def _blocks(where: str, content: str | list[Any], place: str) -> list[dict[str, Any]]:
    """Validated blocks, with the parts of the conversation that texts and images become. The content of a
    result is a list of parts.
    """
    if isinstance(content, str):
        return [{"type": "text", "part": text(content)}]
    out = []
    for i, block_body in enumerate(content):
        at = f"{where}[{i}]"
        kind = type_of(block_body)
        if kind is None or kind not in PLACES[place]:
            limit = f"this server supports {', '.join(PLACES[place])} here"
            raise InvalidArgument(f"{at}.type", kind, limit)
        block = checked(BLOCKS[kind], without_nulls(block_body, at, INPUT), at)
        if kind == "tool_result":
            failed = [text("Error:")] if block.get("is_error") else []
            parts = _parts(f"{at}.content", block.get("content", ""), "result")
            block = {**block, "content": [*failed, *parts]}
        elif kind in ("text", "image"):
            block = {"type": kind, "part": _part(block, at)}
        out.append(block)
    return out


def _parts(where: str, content: str | list[Any], place: str) -> list[dict[str, Any]]:
    return [block["part"] for block in _blocks(where, content, place)]


def _part(block: dict[str, Any], where: str) -> dict[str, Any]:
    if block["type"] == "text":
        return text(block["text"])
    source = block["source"]
    if "url" in source:
        return image(source["url"], f"{where}.source.url")
    return image(f"data:{source['media_type']};base64,{source['data']}", f"{where}.source")
