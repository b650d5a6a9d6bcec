"""The parts of requests that work here. The API's own types have many others."""

from __future__ import annotations

from typing import Any, Literal, Required

from pydantic import with_config
from typing_extensions import TypedDict

from jengine.serving.http.bodies import STRICT, Level, validator_of

Status = Literal["in_progress", "completed", "incomplete"]


class Kept(TypedDict, total=False):
    """What items of an earlier response bring along, without effect."""

    id: str
    status: Status


@with_config(STRICT)
class Message(Kept, total=False):
    type: Literal["message"]
    role: Required[Literal["user", "assistant", "system", "developer"]]
    content: Required[str | list[dict[str, Any]]]
    phase: str


@with_config(STRICT)
class FunctionCall(Kept, total=False):
    type: Required[Literal["function_call"]]
    call_id: Required[str]
    name: Required[str]
    arguments: Required[str]


@with_config(STRICT)
class FunctionCallOutput(Kept, total=False):
    type: Required[Literal["function_call_output"]]
    call_id: Required[str]
    output: Required[str | list[dict[str, Any]]]


@with_config(STRICT)
class Summary(TypedDict):
    type: Literal["summary_text"]
    text: str


@with_config(STRICT)
class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


@with_config(STRICT)
class Reasoning(Kept, total=False):
    type: Required[Literal["reasoning"]]
    summary: list[Summary]
    content: list[ReasoningText]


@with_config(STRICT)
class InputText(TypedDict):
    type: Literal["input_text"]
    text: str


@with_config(STRICT)
class InputImage(TypedDict, total=False):
    """`detail` has no effect."""

    type: Required[Literal["input_image"]]
    image_url: Required[str]
    detail: Literal["auto", "low", "high"]


@with_config(STRICT)
class OutputText(TypedDict, total=False):
    type: Required[Literal["output_text"]]
    text: Required[str]
    annotations: list[Any]
    logprobs: list[Any]


@with_config(STRICT)
class Tool(TypedDict, total=False):
    type: Required[Literal["function"]]
    name: Required[str]
    description: str
    parameters: dict[str, Any]
    strict: bool


@with_config(STRICT)
class NamedTool(TypedDict):
    type: Literal["function"]
    name: str


@with_config(STRICT)
class Format(TypedDict, total=False):
    type: Required[Literal["text", "json_object", "json_schema"]]
    name: str
    schema: dict[str, Any]
    description: str
    strict: bool


@with_config(STRICT)
class Text(TypedDict, total=False):
    format: Format
    verbosity: Literal["medium"]


@with_config(STRICT)
class ReasoningConfig(TypedDict, total=False):
    effort: str
    summary: Literal["auto"]


@with_config(STRICT)
class StreamOptions(TypedDict, total=False):
    include_obfuscation: Literal[False]


class Prompt(TypedDict, total=False):
    """What the prompt depends on."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str
    tools: list[dict[str, Any]]
    tool_choice: Literal["none", "auto", "required"] | NamedTool
    parallel_tool_calls: bool
    reasoning: ReasoningConfig
    text: Text


@with_config(STRICT)
class CountBody(Prompt, total=False):
    """/v1/responses/input_tokens."""


@with_config(STRICT)
class ResponsesBody(Prompt, Level, total=False):
    """/v1/responses."""

    max_output_tokens: int
    metadata: dict[str, str]
    include: list[Literal["reasoning.encrypted_content"]]
    stream_options: StreamOptions
    prompt_cache_key: str
    prompt_cache_options: Any
    prompt_cache_retention: Any
    safety_identifier: str
    service_tier: str
    user: str


TOOL = validator_of(Tool)
ITEMS = {
    "message": validator_of(Message),
    "function_call": validator_of(FunctionCall),
    "function_call_output": validator_of(FunctionCallOutput),
    "reasoning": validator_of(Reasoning),
}
PARTS = {
    "input_text": validator_of(InputText),
    "input_image": validator_of(InputImage),
    "output_text": validator_of(OutputText),
}
