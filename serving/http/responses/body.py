"""Reads the bodies of /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from typing import Any

from jengine import InvalidArgument
from jengine.serving.http.bodies import LEVEL, Body, BodyFields, checked
from jengine.serving.http.chat_api import Asked
from jengine.serving.http.responses.conversation import conversation
from jengine.serving.http.responses.types import TOOL, CountBody, ResponsesBody

# Fields that clients send, and that do not affect answers.
IGNORED = frozenset((
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
    "user",
))  # fmt: skip
# These need a server that keeps responses.
STATE = {
    "previous_response_id": "send the earlier items in input",
    "conversation": "send the earlier items in input",
    "store": "must be false",
    "background": "must be false",
    "prompt": "send the prompt in input",
}
REFUSED = frozenset((
    *STATE, "access_programs", "background_options", "context_management", "image", "max_tool_calls",
    "moderation", "top_logprobs", "truncation", "n", "logprobs", "prompt_logprobs", "max_tokens",
))  # fmt: skip
NEUTRAL = {"store": False, "background": False, "truncation": "disabled", "top_logprobs": 0}
FORM = BodyFields(ResponsesBody, ignored=IGNORED, refused=REFUSED, neutral=NEUTRAL)
COUNT = BodyFields(CountBody, sampling=False, ignored=IGNORED, refused=REFUSED, neutral=NEUTRAL)
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "tool_choice": "tool_choice"}


def read(given: dict[str, Any]) -> Asked:
    """Raises InvalidArgument, naming the field."""
    _check_state(given)
    body = FORM.read(given)
    if "stream_options" in body.fields and not body.get("stream"):
        raise InvalidArgument("stream_options", body.get("stream_options"), "needs stream=true")
    sampling = dict(body.sampling)
    if "max_output_tokens" in body.fields:
        sampling["max_tokens"] = body.fields["max_output_tokens"]
    return _asked(body.fields, sampling)


def read_to_count(given: dict[str, Any]) -> Asked:
    """The body of a request whose prompt is counted. Raises as `read`."""
    _check_state(given)
    return _asked(COUNT.read(given).fields, {})


def _check_state(given: dict[str, Any]) -> None:
    for name in STATE.keys() & given.keys():
        if given[name] is not None and given[name] is not NEUTRAL.get(name):
            raise InvalidArgument(name, given[name], f"this server keeps no responses: {STATE[name]}")


def _asked(own: dict[str, Any], sampling: dict[str, Any]) -> Asked:
    fields = {
        **{name: own[name] for name in (*LEVEL, "parallel_tool_calls") if name in own},
        "messages": conversation(own.get("input"), own.get("instructions")),
    }
    names = dict(NAMES)
    if own.get("tools"):
        fields["tools"] = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(own["tools"])]
    if (choice := own.get("tool_choice")) is not None:
        named = isinstance(choice, dict)
        fields["tool_choice"] = (
            {"type": "function", "function": {"name": choice["name"]}} if named else choice
        )
        if named or choice == "required":
            names["structured_outputs"] = "tools"
    if "effort" in own.get("reasoning", {}):
        fields["reasoning_effort"] = own["reasoning"]["effort"]
    if (form := own.get("text", {}).get("format")) is not None:
        fields["response_format"] = _format(form)
        names |= {"structured_outputs": "text.format", "response_format": "text.format"}
    return Asked(Body(fields, sampling), names, own)


def _tool(where: str, given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "function":
        limit = "must be function: this server runs no tools itself"
        raise InvalidArgument(f"{where}.type", given.get("type"), limit)
    tool = checked(TOOL, given, where)
    return {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}


def _format(form: dict[str, Any]) -> dict[str, Any]:
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    if "schema" not in form:
        raise InvalidArgument("text.format.schema", None, "must be given")
    return {"type": "json_schema", "json_schema": {"name": form.get("name", ""), "schema": form["schema"]}}
