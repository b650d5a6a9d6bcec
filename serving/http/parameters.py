"""Converts bodies to sampling parameters."""

from __future__ import annotations

from typing import Any

from jengine import GenerationParams, InvalidArgument, SamplingParams, StructuredOutputs
from jengine.serving.grpc.conversions import with_beams
from jengine.serving.http.bodies import Body

EXCLUSIVE = (
    "only one of these may constrain the output: tool_choice, response_format, structured_outputs, guided_..."
)
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")  # vLLM's older names


def completion_params(body: Body, default: SamplingParams) -> GenerationParams:
    """Sampling parameters of a completion request.

    Raises:
        InvalidArgument: naming the field.
    """
    given = dict(body.sampling)
    if body.get("echo") and given.get("max_tokens") == 0:
        given["max_tokens"] = 1  # the token is not shown
    logprobs = body.get("logprobs")
    if logprobs is not None:
        given["logprobs"] = logprobs
        if body.get("echo"):
            given.setdefault("prompt_logprobs", logprobs)
    if (structure := _structure(body, given)) is not None:
        given["structured_outputs"] = structure
    beams: dict[str, Any] = {
        name: body.get(name) for name in ("use_beam_search", "length_penalty") if name in body.fields
    }
    return with_beams({**given, **beams}, default)


def chat_params(body: Body, default: SamplingParams) -> SamplingParams:
    """Sampling parameters of a chat request.

    Raises:
        InvalidArgument: naming the field.
    """
    given = dict(body.sampling)
    most = body.get("max_completion_tokens")
    if most is not None:
        if given.get("max_tokens", most) != most:
            raise InvalidArgument(
                "max_completion_tokens", most, f"differs from max_tokens={given['max_tokens']}"
            )
        given["max_tokens"] = most
    if default.max_tokens == SamplingParams().max_tokens:
        given.setdefault("max_tokens", None)  # the default for chats: no limit
    top = body.get("top_logprobs")
    if body.get("logprobs"):
        given["logprobs"] = top or 0
    elif top is not None:
        raise InvalidArgument("top_logprobs", top, "needs logprobs=true")
    return _params(given, _structure(body, given), default)


def names_of(body: Body) -> dict[str, str]:
    """This body's names of fields that jengine's errors call differently; see HttpCall."""
    names = {}
    if "messages" in body.fields and "prompt" not in body.fields:
        names["prompt"] = "messages"
    for name in (*GUIDED, "response_format"):
        if body.get(name) is not None:
            names["structured_outputs"] = name
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
    given: dict[str, Any], structure: StructuredOutputs | None, default: SamplingParams
) -> SamplingParams:
    if structure is not None:
        given["structured_outputs"] = structure
    return default.clone(**given)


def _structure(body: Body, given: dict[str, Any]) -> StructuredOutputs | None:
    """The constraint on the output, of which there may be only one."""
    found: dict[str, StructuredOutputs] = {}
    for name in GUIDED:
        if (value := body.get(name)) is not None:
            found[name] = StructuredOutputs(**{name.removeprefix("guided_"): value})
    form = body.get("response_format")
    if form is not None and form["type"] != "text":
        schema = (
            form["json_schema"].get("schema", {}) if form["type"] == "json_schema" else {"type": "object"}
        )
        found["response_format"] = StructuredOutputs(json=schema)
    if len(found) + ("structured_outputs" in given) > 1:
        field = next(iter(found))
        raise InvalidArgument(field, body.get(field), EXCLUSIVE)
    return next(iter(found.values()), None)
