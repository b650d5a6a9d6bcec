"""The parts of Anthropic's requests that work here. The API's own types have no others."""

from __future__ import annotations

from typing import Any, Literal, Required, TypedDict

from pydantic import with_config

from jengine.serving.http.bodies import STRICT, Level, validator_of


class CacheControl(TypedDict, total=False):
    """Marks of caching: any object. Prefixes are cached without them."""

    cache_control: dict[str, Any]


@with_config(STRICT)
class Text(CacheControl, total=False):
    type: Required[Literal["text"]]
    text: Required[str]


@with_config(STRICT)
class Base64Image(TypedDict):
    type: Literal["base64"]
    media_type: str
    data: str


@with_config(STRICT)
class UrlImage(TypedDict):
    type: Literal["url"]
    url: str


@with_config(STRICT)
class Image(CacheControl, total=False):
    type: Required[Literal["image"]]
    source: Required[Base64Image | UrlImage]


@with_config(STRICT)
class Thinking(TypedDict, total=False):
    type: Required[Literal["thinking"]]
    thinking: Required[str]
    signature: str


@with_config(STRICT)
class DirectCaller(TypedDict):
    type: Literal["direct"]


@with_config(STRICT)
class ToolUse(CacheControl, total=False):
    type: Required[Literal["tool_use"]]
    id: Required[str]
    name: Required[str]
    input: Required[dict[str, Any]]
    caller: DirectCaller


@with_config(STRICT)
class ToolResult(CacheControl, total=False):
    type: Required[Literal["tool_result"]]
    tool_use_id: Required[str]
    content: str | list[dict[str, Any]]
    is_error: bool


@with_config(STRICT)
class Message(TypedDict):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


@with_config(STRICT)
class Tool(CacheControl, total=False):
    type: Literal["custom"]
    name: Required[str]
    input_schema: Required[dict[str, Any]]
    description: str
    strict: bool
    eager_input_streaming: bool
    defer_loading: Literal[False]


@with_config(STRICT)
class ToolChoice(TypedDict, total=False):
    type: Required[Literal["auto", "any", "tool", "none"]]
    name: str
    disable_parallel_tool_use: bool


@with_config(STRICT)
class ThinkingConfig(TypedDict, total=False):
    type: Required[Literal["enabled", "adaptive", "disabled"]]
    budget_tokens: int
    display: Literal["summarized", "omitted"]


@with_config(STRICT)
class OutputFormat(TypedDict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


@with_config(STRICT)
class OutputConfig(TypedDict, total=False):
    effort: Literal["low", "medium", "high", "xhigh", "max"]
    format: OutputFormat


@with_config(STRICT)
class KeepThinking(TypedDict):
    """What happens anyway."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


@with_config(STRICT)
class ContextManagement(TypedDict):
    edits: list[KeepThinking]


class Prompt(CacheControl, total=False):
    """What the prompt depends on."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]]
    tools: list[dict[str, Any]]
    tool_choice: ToolChoice
    thinking: ThinkingConfig
    output_config: OutputConfig
    context_management: ContextManagement


@with_config(STRICT)
class CountBody(Prompt, total=False):
    """/v1/messages/count_tokens."""


@with_config(STRICT)
class MessagesBody(Prompt, Level, total=False):
    """/v1/messages."""

    stop_sequences: list[str]
    metadata: dict[str, Any]
    service_tier: str


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
