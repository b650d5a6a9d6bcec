"""Reads the bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from jengine import InvalidArgument
from jengine.serving.http import policy
from jengine.serving.http.bodies import LEVEL, Body, BodyFields
from jengine.serving.http.bodies import checked as checked_by
from jengine.serving.http.chat_api import Asked
from jengine.serving.http.messages.conversation import conversation
from jengine.serving.http.messages.types import TOOL, CountBody, MessagesBody
from jengine.serving.http.thinking import thinking_variables

IGNORED, REFUSED = (policy.fields(policy.MESSAGES, outcome) for outcome in ("accepted", "error"))
FORM = BodyFields(MessagesBody, ignored=IGNORED, refused=REFUSED)
COUNT = BodyFields(CountBody, sampling=False, ignored=IGNORED, refused=REFUSED)
NAMES = {"prompt": "messages", "stop": "stop_sequences", "tool_choice": "tool_choice"}
NAMES["thinking_budget"] = "thinking.budget_tokens"


def read(given: dict[str, Any]) -> Asked:
    """Raises InvalidArgument, naming the field."""
    policy.check_fields(policy.MESSAGES, given, {})
    policy.log_accepted("/v1/messages", given)
    body = FORM.read(given)
    if "max_tokens" not in body.sampling:
        raise InvalidArgument("max_tokens", None, "must be given")
    sampling = dict(body.sampling)
    if "stop_sequences" in body.fields:
        sampling["stop"] = body.fields["stop_sequences"]
    return _asked(body.fields, sampling)


def read_to_count(given: dict[str, Any]) -> Asked:
    """The body of a request whose prompt is counted. Raises as `read`."""
    return _asked(COUNT.read(given).fields, {})


def _asked(own: dict[str, Any], sampling: dict[str, Any]) -> Asked:
    if not own.get("messages"):
        raise InvalidArgument("messages", own.get("messages"), "must have at least one message")
    messages = conversation(own["messages"], own.get("system"))
    fields = {
        **{name: own[name] for name in LEVEL if name in own},
        "messages": messages,
        **_tools(own.get("tools", []), own.get("tool_choice")),
        **_thinking(own.get("thinking"), sampling.get("max_tokens")),
    }
    if messages[-1]["role"] == "assistant":
        fields["continue_final_message"] = True
    names, config = dict(NAMES), own.get("output_config", {})
    if "effort" in config:
        fields["reasoning_effort"] = config["effort"]
    if "format" in config:
        schema = {"name": "answer", "schema": config["format"]["schema"]}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        names |= {"structured_outputs": "output_config.format", "response_format": "output_config.format"}
    elif own.get("tool_choice", {}).get("type") in ("any", "tool"):
        names["structured_outputs"] = "tools"
    return Asked(Body(fields, sampling), names, own)


def _tools(given: list[dict[str, Any]], choice: dict[str, Any] | None) -> dict[str, Any]:
    """The tools and their choice, as fields of a chat's body."""
    fields: dict[str, Any] = {}
    if given:
        fields["tools"] = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(given)]
    if choice is None:
        return fields
    kind, name = choice["type"], choice.get("name")
    if kind in ("any", "tool") and not given:
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


def _tool(where: str, given: dict[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind not in (None, "custom"):
        raise InvalidArgument(f"{where}.type", kind, "must be custom: this server runs no tools itself")
    tool = checked_by(TOOL, given, where)
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
