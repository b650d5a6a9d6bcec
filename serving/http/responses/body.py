"""Reads the bodies of /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from jengine import InvalidArgument
from jengine.serving.http.bodies import LEVEL, Body, BodyFields
from jengine.serving.http.chat_api import Asked
from jengine.serving.http.policy import RESPONSES, check_fields, fields, log_accepted, values
from jengine.serving.http.responses.conversation import conversation
from jengine.serving.http.responses.tools import read_tools
from jengine.serving.http.responses.types import CountBody, ResponsesBody

PATH = "/v1/responses"
ECHOED = frozenset(("user", "prompt_cache_key", "safety_identifier"))
IGNORED = fields(RESPONSES, "accepted") - ECHOED
REFUSED = fields(RESPONSES, "error")
NEUTRAL = {"background": False, "truncation": "disabled", "n": 1}
FORM = BodyFields(ResponsesBody, ignored=IGNORED, refused=REFUSED, neutral=NEUTRAL)
COUNT = BodyFields(
    CountBody, sampling=False, ignored=fields(RESPONSES, "accepted"), refused=REFUSED, neutral=NEUTRAL
)
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "tool_choice": "tool_choice",
    "logprobs": "top_logprobs",
}
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = values(RESPONSES, "accepted", "include") | {LOGPROBS}
STORED_INPUT = "stored input"  # of Asked.own: the items as JSON, if the response will be stored


def read(body: dict[str, Any], stores: bool = False) -> Asked:
    """Reads a request. `stores`: whether the server keeps responses.

    Raises:
        InvalidArgument: naming the field.
    """
    check_fields(RESPONSES, body, NEUTRAL)
    log_accepted(PATH, (name for name, value in body.items() if value is not None))
    request, sampling = FORM.read(body)
    if "stream_options" in request and not request.get("stream"):
        raise InvalidArgument("stream_options", request["stream_options"], "needs stream=true")
    if request.get("store") and not stores:
        limit = "must be false, since this server keeps no responses (response_store_bytes)"
        raise InvalidArgument("store", True, limit)
    if "max_output_tokens" in request:
        sampling = {**sampling, "max_tokens": request["max_output_tokens"]}
    return _asked({**request, "store": request.get("store", stores)}, sampling)


def read_to_count(body: dict[str, Any]) -> Asked:
    """The body of a request whose prompt is counted. Raises as `read`."""
    check_fields(RESPONSES, body, NEUTRAL)
    return _asked(COUNT.read(body).fields, {})


def _asked(request: dict[str, Any], sampling: dict[str, Any]) -> Asked:
    tools = read_tools(request.get("tools", []), request.get("tool_choice"))
    fields = {
        **{
            name: request[name]
            for name in (*LEVEL, "parallel_tool_calls", "max_tool_calls")
            if name in request
        },
        **_logprobs(request),
        "messages": conversation(request.get("input"), request.get("instructions")),
        "tools": tools.functions,
        "tool_grammars": tools.grammars,
    }
    names = dict(NAMES)
    if tools.choice is not None:
        fields["tool_choice"] = tools.choice
        if tools.choice not in ("none", "auto"):
            names["structured_outputs"] = "tools"
    if "effort" in request.get("reasoning", {}):
        fields["reasoning_effort"] = request["reasoning"]["effort"]
    if (form := request.get("text", {}).get("format")) is not None:
        fields["response_format"] = _format(form)
        names |= {"structured_outputs": "text.format", "response_format": "text.format"}
    stored = {STORED_INPUT: _as_json(request["input"])} if request.get("store") else {}
    return Asked(Body(fields, sampling), names, {**request, **stored, "tools": tools})


def _as_json(items: str | list[Any]) -> bytes:
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return msgspec.json.encode(items)


def _logprobs(request: Mapping[str, Any]) -> dict[str, Any]:
    for i, name in enumerate(request.get("include", ())):
        if name not in INCLUDABLE:
            raise InvalidArgument(f"include[{i}]", name, f"must be one of {', '.join(sorted(INCLUDABLE))}")
    top = request.get("top_logprobs", 0)
    return {"logprobs": True, "top_logprobs": top} if top or LOGPROBS in request.get("include", ()) else {}


def _format(form: dict[str, Any]) -> dict[str, Any]:
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    if "schema" not in form:
        raise InvalidArgument("text.format.schema", None, "must be given")
    return {"type": "json_schema", "json_schema": {"name": form.get("name", ""), "schema": form["schema"]}}
