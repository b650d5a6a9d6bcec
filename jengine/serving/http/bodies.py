"""Request bodies: OpenAI's fields and vLLM's. Every field has its effect or is rejected by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Required, TypedDict, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import SchemaValidator

from jengine import InvalidArgument, SamplingParams
from jengine.serving.http import policy

# Fields that clients send to all servers, and that do not affect answers.
IGNORED = policy.fields(policy.CHAT, "accepted")
# as long as the body
LONG_FIELDS = frozenset((
    "prompt", "messages", "input", "tokens", "allowed_token_ids", "stop_token_ids", "text_1", "text_2",
    "data_1", "data_2", "queries", "query", "documents", "system", "instructions", "prediction",
))  # fmt: skip
DOCUMENTS = frozenset((
    "tools", "chat_template", "chat_template_kwargs", "structured_outputs", "response_format",
    "output_config", "text",
))  # fmt: skip
MAX_DOCUMENT, MAX_VALUE = 2**20, 2**16  # bytes of a value's JSON, in these fields and in all others
# Members whose value is a client's own JSON, in which null has a meaning.
FREE = frozenset((
    "arguments", "chat_template_kwargs", "input_schema", "json", "kv_transfer_params",
    "logit_bias", "metadata", "mm_processor_kwargs", "parameters", "schema",
))  # fmt: skip
# Values equivalent to leaving the field out.
NEUTRAL: Mapping[str, object] = {"best_of": 1, "modalities": ["text"], "suffix": ""}


@with_config(ConfigDict(extra="forbid", strict=True))
class Strict(TypedDict):
    """An object without other members, whose values are not converted."""


class StreamOptions(Strict, total=False):
    """`continuous_usage_stats`: include usage in every event."""

    include_usage: bool
    include_obfuscation: bool
    continuous_usage_stats: bool


class Level(TypedDict, total=False):
    """How a request is served: vLLM's fields, and jengine's targets. `timeout` is in seconds."""

    stream: bool
    request_id: str
    priority: int
    timeout: float
    ttft_ms: float
    tpot_ms: float
    cache_salt: str


class Extras(Level, total=False):
    """vLLM's fields other than those of SamplingParams."""

    kv_transfer_params: dict[str, Any]
    return_token_ids: bool
    return_tokens_as_token_ids: bool
    stream_options: StreamOptions


class CompletionBody(Extras, Strict, total=False):
    """/v1/completions. `use_beam_search`: n is the width."""

    model: Required[str]
    prompt: Required[str | list[Any]]
    echo: bool
    logprobs: int
    add_special_tokens: bool
    use_beam_search: bool
    length_penalty: float


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningConfig(Strict, total=False):
    """`exclude`: the answer does not show the reasoning."""

    effort: Effort
    max_tokens: int
    enabled: bool
    exclude: bool


class ThinkingSwitch(Strict, total=False):
    type: Required[Literal["enabled", "disabled", "adaptive", "auto"]]
    budget_tokens: int


class Function(TypedDict, total=False):
    name: Required[str]
    description: str
    parameters: dict[str, Any]
    strict: bool | None


class FunctionTool(TypedDict):
    function: Function
    type: Literal["function"]


class FunctionName(TypedDict):
    name: str


class NamedFunction(TypedDict):
    """A tool that must be called."""

    type: str
    function: FunctionName


class JsonSchema(TypedDict, total=False):
    name: Required[str]
    description: str
    schema: dict[str, Any]
    strict: bool | None


class SchemaFormat(TypedDict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class PlainFormat(TypedDict):
    type: Literal["text", "json_object"]


class ChatBody(Extras, Strict, total=False):
    """/v1/chat/completions."""

    model: Required[str]
    messages: Required[Any]
    logprobs: bool
    top_logprobs: int
    max_completion_tokens: int
    reasoning_effort: Effort
    response_format: PlainFormat | SchemaFormat
    tools: list[Any]
    tool_choice: Literal["none", "auto", "required"] | NamedFunction
    parallel_tool_calls: bool
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str
    chat_template_kwargs: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    include_reasoning: bool
    enable_thinking: bool
    thinking: bool | ThinkingSwitch
    thinking_budget: int
    thinking_budget_tokens: int
    reasoning: ReasoningConfig


class PoolingExtras(Strict, total=False):
    """Fields of all requests without generated text."""

    model: str
    user: str
    request_id: str
    priority: int
    timeout: float
    cache_salt: str


class EmbeddingBody(PoolingExtras, total=False):
    """/v1/embeddings, with fields of PoolingParams."""

    input: Required[str | list[Any]]
    dimensions: int
    encoding_format: Literal["float", "base64"]
    add_special_tokens: bool
    pooling: str
    normalize: bool


class ScoreBody(PoolingExtras, total=False):
    """/v1/score: vLLM has given the texts three pairs of names, of which a request uses one.

    `instruction`: for rerankers.
    """

    instruction: str
    text_1: str | list[str]
    text_2: str | list[str]
    queries: str | list[str]
    documents: str | list[str]
    data_1: str | list[str]
    data_2: str | list[str]


class Document(Strict):
    """A document in the form of Cohere and Jina."""

    text: str


class RerankBody(PoolingExtras, total=False):
    """/v1/rerank. `top_n`: 0 for all."""

    instruction: str
    query: str
    documents: list[str | Document]
    top_n: int
    return_documents: bool


class TokenizeBody(Strict, total=False):
    """/tokenize: a text or a conversation."""

    model: str
    prompt: str
    messages: list[Any]
    add_special_tokens: bool
    return_token_strs: bool
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str
    chat_template_kwargs: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    tools: list[FunctionTool]


class DetokenizeBody(Strict, total=False):
    """/detokenize."""

    model: str
    tokens: list[int]


class LoadLoraBody(Strict, total=False):
    """/v1/load_lora_adapter. `load_inplace`: replace the adapter of this name."""

    lora_name: str
    lora_path: str
    load_inplace: bool


class UnloadLoraBody(Strict, total=False):
    """/v1/unload_lora_adapter. `lora_int_id`: 1 for the first adapter that was loaded, and so on."""

    lora_name: str
    lora_int_id: int


class Body(NamedTuple):
    """A validated body.

    Attributes:
        fields: the given fields, except sampling parameters.
        sampling: fields of SamplingParams.
    """

    fields: dict[str, Any]
    sampling: dict[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


def most_bytes(name: str) -> int | None:
    """The largest value of a field, as JSON; None: the whole body."""
    return None if name in LONG_FIELDS else MAX_DOCUMENT if name in DOCUMENTS else MAX_VALUE


def validator_of(type: Any) -> SchemaValidator:
    """A validator that stops at a list's first invalid item: errors for each of a million items would take
    seconds.
    """

    def failing_fast(schema: Any) -> Any:
        if isinstance(schema, list | tuple):
            return [failing_fast(part) for part in schema]
        if not isinstance(schema, dict):
            return schema
        checked_schema = {name: failing_fast(part) for name, part in schema.items()}
        return (
            {**checked_schema, "fail_fast": True} if checked_schema.get("type") == "list" else checked_schema
        )

    return SchemaValidator(failing_fast(TypeAdapter(type).core_schema))


class BodyFields:
    """The fields that an endpoint's body may have.

    Args:
        type: a TypedDict.
        not_sampling: fields that are not sampling parameters, although SamplingParams has one of that name.
        ignored: fields that clients send, and that do not affect answers.
        refused: fields of the API that are not in the type, and do not work here.
        neutral: values equivalent to leaving the field out.
    """

    def __init__(
        self,
        type: Any,
        not_sampling: Iterable[str] = (),
        sampling: bool = True,
        ignored: Iterable[str] = IGNORED,
        refused: Iterable[str] = (),
        neutral: Mapping[str, object] = NEUTRAL,
    ) -> None:
        self._validator = validator_of(type)
        self._supported = frozenset(get_type_hints(type))
        self._known = self._supported.union(refused)
        # OpenAI's APIs do not all have all of them
        self._ignored = frozenset(ignored) if sampling else self._known.intersection(ignored)
        self._neutral = neutral
        self._sampling = frozenset[str]()
        if sampling:
            fields = frozenset(SamplingParams.__dataclass_fields__)
            self._sampling = fields.difference(not_sampling, refused, ("output_kind",))

    def read(self, body: Mapping[str, Any]) -> Body:
        """Validates a body. Fields with null count as missing, at any depth.

        Raises:
            InvalidArgument: naming the field.
        """
        fields: dict[str, Any] = {}
        sampling: dict[str, Any] = {}
        for name, value in body.items():
            if (
                value is None
                or name in self._ignored
                or (name in self._neutral and self._neutral[name] == value)
            ):
                continue
            if name not in LONG_FIELDS and name not in FREE:  # the others are read elsewhere
                value = without_nulls(value, name)
            if name in self._sampling:
                sampling[name] = value
            elif name in self._supported:
                fields[name] = value
            elif name in self._known:
                raise InvalidArgument(name, value, "this server does not support it")
            elif self._sampling:
                _unknown(name, value)
            else:
                raise InvalidArgument(name, value, "there is no such field")
        if sampling.keys() & {"structured_outputs"} and not isinstance(sampling["structured_outputs"], dict):
            raise InvalidArgument("structured_outputs", sampling["structured_outputs"], "must be an object")
        checked(self._validator, {"model": "", **fields} if "model" in self._known else fields)
        return Body(fields, sampling)


def checked(validator: SchemaValidator, value: Any, root: str = "") -> Any:
    """Validates a value.

    Raises:
        InvalidArgument: naming the invalid part, below `root`.
    """
    try:
        return validator.validate_python(value)
    except ValidationError as wrong:
        errors = wrong.errors(include_url=False)
        # for a union, those of the type that fits best: the deepest, and of its `type` if some are
        depth = max(len(error["loc"]) for error in errors)
        errors = [error for error in errors if len(error["loc"]) == depth]
        other_types = [error["loc"][:-1] for error in errors if error["type"] == "literal_error"]
        errors = [error for error in errors if error["loc"][:-1] not in other_types] or errors
        error, reasons = errors[0], dict.fromkeys(error["msg"] for error in errors)
        path = root + "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"] if _shown(part)
        )
        raise InvalidArgument(path.lstrip(".") or "body", error["input"], "; ".join(reasons)) from None
    except RecursionError:
        raise InvalidArgument(root or "body", None, "is nested too deeply") from None


def without_nulls(value: Any, field: str, free: frozenset[str] = FREE) -> Any:
    """JSON without members that are null, at any depth: clients send them for what they leave out.

    Args:
        free: names of members that stay as they are.

    Raises:
        InvalidArgument: naming the field: it is nested too deeply.
    """
    try:
        return _present(value, free)
    except RecursionError:
        raise InvalidArgument(field, None, "is nested too deeply") from None


def _present(value: Any, free: frozenset[str]) -> Any:
    if isinstance(value, list):
        return [_present(part, free) for part in value]
    if not isinstance(value, dict):
        return value
    return {
        name: part if name in free else _present(part, free)
        for name, part in value.items()
        if part is not None
    }


def _shown(part: int | str) -> bool:
    """Whether a part of a path is shown; names of types are not."""
    return isinstance(part, int) or not (part[:1].isupper() or "[" in part or part == "str")


def _unknown(name: str, value: Any) -> None:
    if len(name) <= 100 and name.isidentifier() and name not in SamplingParams.__dataclass_fields__:
        SamplingParams(**{name: value})  # raises an error with the alternative
    raise InvalidArgument(name, value, "there is no such field")


TOOLS = validator_of(list[FunctionTool])
LEVEL = ("model", *get_type_hints(Level))
COMPLETION = BodyFields(CompletionBody, not_sampling=("logprobs",), refused=("suffix", "prompt_embeds"))
CHAT = BodyFields(ChatBody, not_sampling=("logprobs",), refused=("modalities",))
EMBEDDING = BodyFields(EmbeddingBody, sampling=False)
SCORE, RERANK = BodyFields(ScoreBody, sampling=False), BodyFields(RerankBody, sampling=False)
TOKENIZE, DETOKENIZE = BodyFields(TokenizeBody, sampling=False), BodyFields(DetokenizeBody, sampling=False)
LOAD_LORA = BodyFields(LoadLoraBody, sampling=False)
UNLOAD_LORA = BodyFields(UnloadLoraBody, sampling=False)
