"""Converts bodies to sampling parameters."""

from __future__ import annotations

from typing import Any

from jengine import InvalidArgument, SamplingParams, StructuredOutputs
from jengine.serving.grpc.conversions import with_beams
from jengine.serving.http.bodies import Body
from jengine.spi import GenerationParams

EXCLUSIVE = "only one of these may constrain the output: tool_choice, response_format, structured_outputs"


def completion_params(body: Body, default: SamplingParams) -> GenerationParams:
    """Sampling parameters of a completion request.

    Raises:
        InvalidArgument: naming the field.
    """
    fields = dict(body.sampling)
    if body.get("echo") and fields.get("max_tokens") == 0:
        fields["max_tokens"] = 1  # the token is not shown
    logprobs = body.get("logprobs")
    if logprobs is not None:
        fields["logprobs"] = logprobs
        if body.get("echo"):
            fields.setdefault("prompt_logprobs", logprobs)
    if (structure := _structure(body, fields)) is not None:
        fields["structured_outputs"] = structure
    beams: dict[str, Any] = {
        name: body.get(name) for name in ("use_beam_search", "length_penalty") if name in body.fields
    }
    return with_beams({**fields, **beams}, default)


def chat_params(body: Body, default: SamplingParams) -> SamplingParams:
    """Sampling parameters of a chat request.

    Raises:
        InvalidArgument: naming the field.
    """
    fields = dict(body.sampling)
    max_tokens = body.get("max_completion_tokens")
    if max_tokens is not None:
        if fields.get("max_tokens", max_tokens) != max_tokens:
            raise InvalidArgument(
                "max_completion_tokens", max_tokens, f"differs from max_tokens={fields['max_tokens']}"
            )
        fields["max_tokens"] = max_tokens
    if default.max_tokens == SamplingParams().max_tokens:
        fields.setdefault("max_tokens", None)  # the default for chats: no limit
    top = body.get("top_logprobs")
    if body.get("logprobs"):
        fields["logprobs"] = top or 0
    elif top is not None:
        raise InvalidArgument("top_logprobs", top, "needs logprobs=true")
    return _params(fields, _structure(body, fields), default)


def names_of(body: Body) -> dict[str, str]:
    """This body's names of fields that jengine's errors call differently; see HttpCall."""
    names = {}
    if "messages" in body.fields and "prompt" not in body.fields:
        names["prompt"] = "messages"
    if body.get("response_format") is not None:
        names["structured_outputs"] = "response_format"
    if body.get("tool_choice") not in (None, "none", "auto"):
        names["structured_outputs"] = "tools"
    if body.get("max_completion_tokens") is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.get("top_logprobs") is not None:
        names["logprobs"] = "top_logprobs"
    return names


def with_structure(params: SamplingParams, field: str, structure: StructuredOutputs) -> SamplingParams:
    """The parameters with the constraint that `field` requests.

    Raises:
        InvalidArgument: there is already a constraint.
    """
    if params.structured_outputs is not None:
        raise InvalidArgument(field, structure, EXCLUSIVE)
    return params.clone(structured_outputs=structure)


def _params(
    fields: dict[str, Any], structure: StructuredOutputs | None, default: SamplingParams
) -> SamplingParams:
    if structure is not None:
        fields["structured_outputs"] = structure
    return default.clone(**fields)


def _structure(body: Body, fields: dict[str, Any]) -> StructuredOutputs | None:
    """The constraint on the output, of which there may be only one."""
    form = body.get("response_format")
    if form is None or form["type"] == "text":
        return None
    if "structured_outputs" in fields:
        raise InvalidArgument("response_format", form, EXCLUSIVE)
    schema = form["json_schema"].get("schema", {}) if form["type"] == "json_schema" else {"type": "object"}
    return StructuredOutputs(json=schema)
