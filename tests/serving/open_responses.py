"""The schema of the Open Responses specification of 2026-04-24 for what a server without hosted tools sends:
which keys answers and events must have, and the types of their values.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

STRICT = ConfigDict(strict=True)  # with further keys
Status = Literal["in_progress", "completed", "incomplete"]
Choice = Literal["none", "auto", "required"]
Number = int | float


@with_config(STRICT)
class TopLogprob(TypedDict):
    token: str
    logprob: Number
    bytes: list[int]


@with_config(STRICT)
class Logprob(TopLogprob):
    top_logprobs: list[TopLogprob]


@with_config(STRICT)
class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: NotRequired[list[Logprob]]


@with_config(STRICT)
class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


Part = Annotated[OutputText | ReasoningText, Field(discriminator="type")]


@with_config(STRICT)
class Message(TypedDict):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["user", "assistant", "system", "developer"]
    content: list[Part]
    phase: NotRequired[Literal["commentary", "final_answer"]]


@with_config(STRICT)
class FunctionCall(TypedDict):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


@with_config(STRICT)
class Reasoning(TypedDict):
    type: Literal["reasoning"]
    id: str
    content: NotRequired[list[Part]]
    summary: list[Part]
    encrypted_content: NotRequired[str]


Item = Annotated[Message | FunctionCall | Reasoning, Field(discriminator="type")]


@with_config(STRICT)
class Tool(TypedDict):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


@with_config(STRICT)
class NamedTool(TypedDict):
    type: Literal["function"]
    name: NotRequired[str]


@with_config(STRICT)
class AllowedTools(TypedDict):
    type: Literal["allowed_tools"]
    tools: list[NamedTool]
    mode: Choice


@with_config(STRICT)
class PlainFormat(TypedDict):
    type: Literal["text", "json_object"]


@with_config(STRICT)
class SchemaFormat(TypedDict):
    """Its schema is always null in the specification."""

    type: Literal["json_schema"]
    name: str
    description: str | None
    strict: bool


@with_config(STRICT)
class Text(TypedDict):
    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]
    verbosity: NotRequired[Literal["low", "medium", "high"]]


@with_config(STRICT)
class Effort(TypedDict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None
    summary: Literal["auto", "concise", "detailed"] | None


@with_config(STRICT)
class Cached(TypedDict):
    cached_tokens: int


@with_config(STRICT)
class Reasoned(TypedDict):
    reasoning_tokens: int


@with_config(STRICT)
class Usage(TypedDict):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: Cached
    output_tokens_details: Reasoned


@with_config(STRICT)
class Incomplete(TypedDict):
    reason: str


@with_config(STRICT)
class Error(TypedDict):
    code: str
    message: str


@with_config(STRICT)
class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: str
    incomplete_details: Incomplete | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[Item]
    error: Error | None
    tools: list[Tool]
    tool_choice: NamedTool | Choice | AllowedTools
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: bool
    text: Text
    top_p: Number
    presence_penalty: Number
    frequency_penalty: Number
    top_logprobs: int
    temperature: Number
    reasoning: Effort | None
    usage: Usage | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: Any
    safety_identifier: str | None
    prompt_cache_key: str | None


class Event(TypedDict):
    sequence_number: int


@with_config(STRICT)
class ResponseEvent(Event):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.failed",
        "response.incomplete",
    ]
    response: Response


@with_config(STRICT)
class ItemEvent(Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item | None


class InItem(Event):
    item_id: str
    output_index: int


@with_config(STRICT)
class PartEvent(InItem):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: Part


@with_config(STRICT)
class Delta(InItem):
    """The specification says `response.reasoning.delta` where OpenAI has `response.reasoning_text.delta`."""

    type: Literal["response.output_text.delta", "response.reasoning.delta"]
    content_index: int
    delta: str
    logprobs: NotRequired[list[Logprob]]


@with_config(STRICT)
class Done(InItem):
    type: Literal["response.output_text.done", "response.reasoning.done"]
    content_index: int
    text: str
    logprobs: NotRequired[list[Logprob]]


@with_config(STRICT)
class ArgumentsDelta(InItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


@with_config(STRICT)
class ArgumentsDone(InItem):
    type: Literal["response.function_call_arguments.done"]
    arguments: str


@with_config(STRICT)
class ErrorBody(TypedDict):
    type: str
    code: str | None
    message: str
    param: str | None


RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)
ERROR: TypeAdapter[Any] = TypeAdapter(ErrorBody)
EVENT: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        ResponseEvent | ItemEvent | PartEvent | Delta | Done | ArgumentsDelta | ArgumentsDone,
        Field(discriminator="type"),
    ]
)
