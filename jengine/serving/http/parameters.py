"""Converts bodies to sampling parameters, and what they say about thinking."""

from __future__ import annotations

from typing import Any

from jengine import InvalidArgument, SamplingParams, StructuredOutputs, Tokenizer
from jengine.serving.grpc.conversions import with_beams
from jengine.serving.http.bodies import Body
from jengine.serving.parsers.formats import AnswerFormat
from jengine.spi import GenerationParams, can_bound

EXCLUSIVE = "only one of these may constrain the output: tool_choice, response_format, structured_outputs"
SWITCHES = {"enabled": True, "disabled": False}  # other types leave the choice to the model


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


def thinking_variables(thinks: bool) -> dict[str, Any]:
    """Variables of Qwen's and of DeepSeek's templates. Others ignore them."""
    return {"enable_thinking": thinks, "thinking": thinks}


def effort_variables(effort: str) -> dict[str, Any]:
    """A template's variables for an effort. Clients send it to every model; templates ignore variables that
    they do not know.
    """
    return {"reasoning_effort": effort, **(thinking_variables(False) if effort == "none" else {})}


def with_thinking(body: Body) -> tuple[Body, dict[str, str]]:
    """A chat's body in which vLLM's fields say what other servers' fields say about thinking, and the names
    of the latter by those of the former.

    Raises:
        InvalidArgument: two fields differ.
    """
    fields, names = dict(body.fields), dict[str, str]()

    def say(field: str, source: str, value: Any) -> None:
        if value is None:
            return
        if fields.setdefault(field, value) != value:
            other = names.get(field, field)
            raise InvalidArgument(source, value, f"differs from {other}={fields[field]}")
        names.setdefault(field, source)

    reasoning, switch = fields.pop("reasoning", {}), fields.pop("thinking", {})
    if isinstance(switch, bool):
        say("thinks", "thinking", switch)
        switch = {}
    say("thinks", "thinking.type", SWITCHES.get(switch.get("type")))
    say("thinks", "enable_thinking", fields.pop("enable_thinking", None))
    say("thinks", "reasoning.enabled", reasoning.get("enabled"))
    say("reasoning_effort", "reasoning.effort", reasoning.get("effort"))
    say("include_reasoning", "reasoning.exclude", False if reasoning.get("exclude") else None)
    say("thinking_budget", "thinking_budget_tokens", fields.pop("thinking_budget_tokens", None))
    say("thinking_budget", "thinking.budget_tokens", switch.get("budget_tokens"))
    say("thinking_budget", "reasoning.max_tokens", reasoning.get("max_tokens"))
    if (budget := fields.get("thinking_budget", 0)) < 0:
        raise InvalidArgument(names.get("thinking_budget", "thinking_budget"), budget, "must be at least 0")
    if (thinks := fields.pop("thinks", None)) is not None:
        variables = {**thinking_variables(thinks), **fields.get("chat_template_kwargs", {})}
        fields["chat_template_kwargs"] = variables
    return Body(fields, body.sampling), names


def with_thinking_budget(
    params: SamplingParams, body: Body, form: AnswerFormat, tokenizer: Tokenizer
) -> SamplingParams:
    """The parameters with a budget that clients also send to models that do not think.

    Raises:
        InvalidArgument: the model thinks, but where its thoughts end is not known here.
    """
    budget = body.get("thinking_budget")
    if budget is None or params.thinking_token_budget is not None:
        return params
    if can_bound(tokenizer):
        return params.clone(thinking_token_budget=budget)
    if form.marks_thoughts:
        raise InvalidArgument(
            "thinking_budget", budget, "this model's thoughts do not end with </think>: use adaptive"
        )
    return params
