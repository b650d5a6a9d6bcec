"""The parts of requests that work here. The API's own types have many others."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required, TypedDict

from pydantic import ConfigDict, Field, with_config

from jengine.serving.http.bodies import Level, StreamOptions, Strict, validator_of


@with_config(ConfigDict(extra="ignore", strict=True))
class Loose(TypedDict):
    """An item. Items come back from clients with members that other servers have added."""


class Message(Loose, total=False):
    role: Required[Literal["user", "assistant", "system", "developer"]]
    content: Required[str | list[dict[str, Any]]]


class FunctionCall(Loose, total=False):
    call_id: Required[str]
    name: Required[str]
    namespace: str
    arguments: Required[str]


class CustomToolCall(Loose, total=False):
    call_id: Required[str]
    name: Required[str]
    namespace: str
    input: Required[str]


class CallOutput(Loose, total=False):
    call_id: Required[str]
    output: Required[str | list[dict[str, Any]]]


class TextPart(Loose):
    text: str


class Reasoning(Loose, total=False):
    summary: list[TextPart]
    content: list[TextPart]


class ItemReference(Loose):
    id: str


class Compaction(Loose):
    """What another server has made of earlier turns."""


@with_config(ConfigDict(extra="allow", strict=True))
class OtherCall(TypedDict, total=False):
    """A call of a tool of another server, or its output. `id` and `call_id` have their usual meaning; other
    members depend on the tool.
    """

    id: str
    call_id: str
    status: str


class Refusal(Loose):
    refusal: str


class InputImage(Loose):
    """`detail` has no effect."""

    image_url: str


class FunctionTool(Strict, total=False):
    type: Required[Literal["function"]]
    name: Required[str]
    description: str
    parameters: dict[str, Any]


class TextFormat(Strict):
    type: Literal["text"]


class GrammarFormat(Strict):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(Strict, total=False):
    type: Required[Literal["custom"]]
    name: Required[str]
    description: str
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")]


class NamespaceTool(Strict, total=False):
    type: Required[Literal["namespace"]]
    name: Required[str]
    description: str
    tools: Required[list[dict[str, Any]]]


class NamedTool(Strict, total=False):
    type: Required[Literal["function", "custom"]]
    name: Required[str]
    namespace: str


class AllowedTools(Strict, total=False):
    type: Required[Literal["allowed_tools"]]
    mode: Literal["none", "auto", "required"]
    tools: Required[list[dict[str, Any]]]


class Format(Strict, total=False):
    type: Required[Literal["text", "json_object", "json_schema"]]
    name: str
    schema: dict[str, Any]
    description: str
    strict: bool


class TextConfig(Strict, total=False):
    format: Format
    verbosity: str


class ReasoningConfig(Strict, total=False):
    effort: str
    summary: str
    generate_summary: str
    context: str
    mode: str


class Prompt(Strict, total=False):
    """What the prompt depends on: /v1/responses/input_tokens."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str
    previous_response_id: str
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    reasoning: ReasoningConfig
    text: TextConfig


class ResponsesBody(Prompt, Level, total=False):
    """/v1/responses."""

    max_output_tokens: int
    max_tool_calls: Annotated[int, Field(ge=1)]
    metadata: dict[str, str]
    include: list[str]
    top_logprobs: Annotated[int, Field(ge=0)]
    store: bool
    stream_options: StreamOptions
    user: str
    prompt_cache_key: str
    safety_identifier: str


OTHER_CALL = validator_of(OtherCall)
ITEMS = {
    "message": validator_of(Message),
    "function_call": validator_of(FunctionCall),
    "function_call_output": validator_of(CallOutput),
    "custom_tool_call": validator_of(CustomToolCall),
    "custom_tool_call_output": validator_of(CallOutput),
    "reasoning": validator_of(Reasoning),
    "item_reference": validator_of(ItemReference),
    "compaction": validator_of(Compaction),
    **dict.fromkeys(
        (
            "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output",
            "apply_patch_call", "apply_patch_call_output", "web_search_call", "file_search_call",
            "code_interpreter_call", "mcp_call",
        ),
        OTHER_CALL,
    ),
}  # fmt: skip
_TEXT = validator_of(TextPart)
PARTS = {
    "input_text": _TEXT,
    "output_text": _TEXT,
    "text": _TEXT,
    "refusal": validator_of(Refusal),
    "input_image": validator_of(InputImage),
}
TOOLS = {
    "function": validator_of(FunctionTool),
    "custom": validator_of(CustomTool),
    "namespace": validator_of(NamespaceTool),
}
NAMED_TOOL, ALLOWED_TOOLS = validator_of(NamedTool), validator_of(AllowedTools)
