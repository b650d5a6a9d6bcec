"""Reads the bodies of /v1/responses and /v1/responses/input_tokens: tools become functions of
/v1/chat/completions, and their calls tools again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from jengine import InvalidArgument, StructuredOutputs
from jengine.serving.grpc.conversions import MAX_MESSAGES
from jengine.serving.http.bodies import LEVEL, Body, BodyFields, checked, without_nulls
from jengine.serving.http.chat_service import ChatInput
from jengine.serving.http.parameters import forces_calls
from jengine.serving.http.policy import RESPONSES, check_fields, fields, log_accepted, names_after
from jengine.serving.http.responses.types import (
    ALLOWED_TOOLS,
    ITEMS,
    NAMED_TOOL,
    PARTS,
    TOOLS,
    Prompt,
    ResponsesBody,
)
from jengine.serving.http.turns import Turns, image, text, type_of
from jengine.serving.parsers.events import clean

HOSTED = names_after("tools: ", RESPONSES, "accepted")
WITHOUT_EFFECT = names_after("tools.", RESPONSES, "accepted")
CHOICES = ("none", "auto", "required")
SEPARATOR = "__"
INPUT = "input"  # the parameter of a custom tool's function
SYNTAX = {"lark": "Lark grammar", "regex": "regular expression"}


class ToolName(NamedTuple):
    """The tool behind a function. `custom`: whether its input is text."""

    name: str
    namespace: str | None = None
    custom: bool = False


class Tools(NamedTuple):
    """The tools of a request.

    Attributes:
        functions: as in /v1/chat/completions.
        names: the tools by their functions' names.
        grammars: of custom tools, by their functions' names. A call that is forced follows them.
        shown: as the answer shows them.
        choice: as in /v1/chat/completions.
    """

    functions: list[dict[str, Any]]
    names: Mapping[str, ToolName]
    grammars: Mapping[str, StructuredOutputs]
    shown: list[dict[str, Any]]
    choice: str | dict[str, Any] | None

    def input_of(self, function: str, arguments: str) -> str:
        """The text that a call gives to a custom tool, also of a call that was cut off."""
        if self.choice == named(function) and function in self.grammars:
            return arguments
        for end in ("", '"}', '\\"}'):
            try:
                value = json.loads(arguments + end)
            except (ValueError, RecursionError):
                continue
            text = value.get(INPUT) if isinstance(value, dict) and len(value) == 1 else None
            return clean(text) if isinstance(text, str) else arguments
        return arguments


def named(function: str) -> dict[str, Any]:
    """The choice of a function."""
    return {"type": "function", "function": {"name": function}}


def flat_name(name: str, namespace: str | None) -> str:
    """The name of a function for a tool."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def read_tools(tools: list[dict[str, Any]], choice: Any) -> Tools:
    """Reads the fields `tools` and `tool_choice`.

    Raises:
        InvalidArgument: naming the field.
    """
    functions: dict[str, dict[str, Any]] = {}
    shown: list[dict[str, Any]] = []
    names: dict[str, ToolName] = {}
    grammars: dict[str, StructuredOutputs] = {}

    def add(where: str, tool: dict[str, Any], namespace: str | None, about: str) -> None:
        custom = tool["type"] == "custom"
        flat = flat_name(tool["name"], namespace)
        if flat in functions:
            raise InvalidArgument(f"{where}.name", flat, "another tool has this name")
        names[flat] = ToolName(tool["name"], namespace, custom)
        form = tool.get("format", {}) if custom else {}
        if form.get("syntax") == "lark":
            grammars[flat] = StructuredOutputs(grammar=form["definition"])
        described = "\n\n".join(filter(None, (about, tool.get("description", ""), _about_input(form))))
        parameters = _input_schema(form) if custom else tool.get("parameters")
        functions[flat] = {
            "name": flat,
            **({"description": described} if described else {}),
            **({} if parameters is None else {"parameters": parameters}),
        }

    for i, tool in enumerate(tools):
        where, kind = f"tools[{i}]", type_of(tool)
        if kind in HOSTED:
            log_accepted("/v1/responses", [f"tools: {kind}"])
            continue
        read = _checked(where, tool, ("function", "custom", "namespace"))
        shown.append(_shown(tool))
        if kind != "namespace":
            add(where, read, None, "")
            continue
        about = read.get("description", "")
        for j, member in enumerate(read["tools"]):
            place = f"{where}.tools[{j}]"
            function = _checked(place, member, ("function", "custom"))
            add(place, function, read["name"], about if j == 0 else "")
    allowed, chosen = _chosen(choice, names)
    called = [{"type": "function", "function": functions[name]} for name in functions if name in allowed]
    return Tools(called, names, grammars, shown, chosen)


def _checked(where: str, tool: Any, kinds: tuple[str, ...]) -> dict[str, Any]:
    kind = type_of(tool)
    if kind not in kinds:
        raise InvalidArgument(f"{where}.type", kind, f"this server supports {', '.join(kinds)}")
    present = {name: value for name, value in tool.items() if name not in WITHOUT_EFFECT}
    checked(TOOLS[kind], present, where)
    return present


def _shown(tool: Any) -> Any:
    """A tool as the answer shows it, with all members that the API's schema requires."""
    match type_of(tool):
        case "function":
            return {"description": None, "parameters": None, "strict": None, **tool}
        case "namespace":
            return {"description": "", **tool}
    return tool


def _about_input(form: Mapping[str, Any]) -> str:
    if form.get("type") != "grammar":
        return ""
    return f"The input follows this {SYNTAX[form['syntax']]}:\n{form['definition']}"


def _input_schema(form: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a custom tool's function: one text."""
    pattern = {"pattern": f"^(?:{form['definition']})$"} if form.get("syntax") == "regex" else {}
    text = {"type": "string", **pattern}
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


# --- the choice -----------------------------------------------------------------------------------


def _chosen(choice: Any, names: Mapping[str, ToolName]) -> tuple[set[str], str | dict[str, Any] | None]:
    """The functions that the model may call, and its choice among them."""
    if choice is None or choice in CHOICES:
        return set(names), choice
    kind = type_of(choice)
    if kind in ("function", "custom"):
        return set(names), named(_function_of("tool_choice", choice, names))
    if kind != "allowed_tools":
        limit = f"must be {', '.join(CHOICES)}, or an object of type function, custom or allowed_tools"
        if kind in HOSTED:
            limit = "this server has no such tool: it runs none itself"
        raise InvalidArgument("tool_choice", choice if kind is None else kind, limit)
    checked(ALLOWED_TOOLS, choice, "tool_choice")
    allowed: set[str] = set()
    for i, tool in enumerate(choice["tools"]):
        if (kind := type_of(tool)) in HOSTED:
            continue
        if kind == "namespace":
            allowed |= {flat for flat, name in names.items() if name.namespace == tool.get("name")}
        else:
            allowed.add(_function_of(f"tool_choice.tools[{i}]", tool, names))
    if not allowed:
        raise InvalidArgument("tool_choice", choice["tools"], "allows none of the tools of this server")
    return allowed, choice.get("mode", "auto")


def _function_of(where: str, choice: Any, names: Mapping[str, ToolName]) -> str:
    tool = checked(NAMED_TOOL, choice, where)
    flat = flat_name(tool["name"], tool.get("namespace"))
    if flat not in names:
        limit = f"must be one of the tools: {', '.join(names)[:200]}" if names else "needs tools"
        raise InvalidArgument(where, flat, limit)
    return flat


PATH = "/v1/responses"
ECHOED = frozenset(("user", "prompt_cache_key", "safety_identifier"))
IGNORED = fields(RESPONSES, "accepted") - ECHOED
REFUSED = fields(RESPONSES, "error")
AS_IN_CHATS = ("parallel_tool_calls", "max_tool_calls", "stream_options")
NEUTRAL = {"background": False, "truncation": "disabled", "n": 1}
FORM = BodyFields(ResponsesBody, ignored=IGNORED, refused=REFUSED, neutral=NEUTRAL)
COUNT = BodyFields(
    Prompt, sampling=False, ignored=fields(RESPONSES, "accepted"), refused=REFUSED, neutral=NEUTRAL
)
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "tool_choice": "tool_choice",
    "logprobs": "top_logprobs",
}
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = names_after("include: ", RESPONSES, "accepted") | {LOGPROBS}
STORED_INPUT = "stored input"  # of ChatInput.request: the items as JSON, if the response will be stored
COMPACTED = "[Earlier turns of this conversation are missing: another server has compacted them.]"
RESULTS = ("output", "outputs", "results", "result", "error")  # members of calls that another server ran


def read(body: dict[str, Any], stores: bool = False) -> ChatInput:
    """Reads a request. `stores`: whether the server keeps responses.

    Raises:
        InvalidArgument: naming the field.
    """
    check_fields(RESPONSES, body, NEUTRAL)
    log_accepted(PATH, (name for name, value in body.items() if value is not None))
    request, sampling = FORM.read(body)
    if request.get("store") and not stores:
        limit = "must be false, since this server keeps no responses (response_store_bytes)"
        raise InvalidArgument("store", True, limit)
    if "max_output_tokens" in request:
        sampling = {**sampling, "max_tokens": request["max_output_tokens"]}
    return _chat_input({**request, "store": request.get("store", stores)}, sampling)


def read_to_count(body: dict[str, Any]) -> ChatInput:
    """The body of a request whose prompt is counted. Raises as `read`."""
    check_fields(RESPONSES, body, NEUTRAL)
    return _chat_input(COUNT.read(body).fields, {})


def _chat_input(request: dict[str, Any], sampling: dict[str, Any]) -> ChatInput:
    tools = read_tools(request.get("tools", []), request.get("tool_choice"))
    fields = {
        **{name: request[name] for name in (*LEVEL, *AS_IN_CHATS) if name in request},
        **_logprobs(request),
        "messages": conversation(request.get("input"), request.get("instructions")),
        "tools": tools.functions,
        "tool_grammars": tools.grammars,
    }
    names = dict(NAMES)
    if "effort" in request.get("reasoning", {}):
        fields["reasoning_effort"] = request["reasoning"]["effort"]
    if (form := request.get("text", {}).get("format")) is not None:
        fields["response_format"] = _format(form)
        names |= {"structured_outputs": "text.format", "response_format": "text.format"}
    if tools.choice is not None:
        fields["tool_choice"] = tools.choice
        if forces_calls(tools.choice):
            names["structured_outputs"] = "tools"
    items = request["input"]
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    stored = {STORED_INPUT: msgspec.json.encode(items)} if request.get("store") else {}
    return ChatInput(Body(fields, sampling), names, {**request, **stored, "tools": tools})


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


def conversation(items: str | list[Any] | None, instructions: str | None) -> list[dict[str, Any]]:
    """The messages, and the instructions first, as a system message.

    Raises:
        InvalidArgument: an item is invalid, or not supported; naming it.
    """
    if not items:
        raise InvalidArgument("input", items, "must be given")
    if len(items) > MAX_MESSAGES and not isinstance(items, str):
        raise InvalidArgument("input", f"{len(items)} items", f"at most {MAX_MESSAGES}")
    turns = Turns(joins=False)
    if instructions is not None:
        turns.add("system", [text(instructions)])
    if isinstance(items, str):
        turns.add("user", [text(items)])
        return turns.messages
    for i, item in enumerate(items):
        _add(turns, f"input[{i}]", item)
    return turns.messages


def _add(turns: Turns, where: str, item: Any) -> None:
    kind = type_of(item, "message")
    if kind is None or kind not in ITEMS:
        raise InvalidArgument(f"{where}.type", kind, f"this server supports {', '.join(ITEMS)}")
    item = checked(ITEMS[kind], without_nulls(item, where), where)
    match kind:
        case "message":
            turns.add(item["role"], _parts(f"{where}.content", item["content"]))
        case "function_call":
            turns.call(item["call_id"], flat_name(item["name"], item.get("namespace")), item["arguments"])
        case "custom_tool_call":
            name = flat_name(item["name"], item.get("namespace"))
            turns.call(item["call_id"], name, {INPUT: item["input"]})
        case "function_call_output" | "custom_tool_call_output":
            turns.result(item["call_id"], _parts(f"{where}.output", item["output"]))
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if parts:
                turns.reasoning("\n".join(part["text"] for part in parts))
        case "compaction":
            turns.add("user", [text(COMPACTED)])
        case "item_reference":
            limit = "names no item that this server keeps: send the item itself, with store=false"
            raise InvalidArgument(f"{where}.id", item["id"], limit)
        case _:
            _add_other(turns, kind, item)


def _add_other(turns: Turns, kind: str, item: dict[str, Any]) -> None:
    """A call of another server's tool, or its output. A call that the server ran has its result within."""
    call_id = item.get("call_id") or item.get("id") or kind
    if kind.endswith("_output"):
        output = item.get("output", "")
        turns.result(call_id, [text(output if isinstance(output, str) else _json(output))])
        return
    hidden = ("type", "id", "call_id", "status", *RESULTS)
    name = kind.removesuffix("_call")
    turns.call(call_id, name, {member: value for member, value in item.items() if member not in hidden})
    if f"{kind}_output" not in ITEMS:
        results = {member: item[member] for member in RESULTS if member in item}
        turns.result(call_id, [text(_json(results) if results else item.get("status", "completed"))])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parts(where: str, content: str | list[Any]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text(content)]
    out = []
    for i, part in enumerate(content):
        kind = type_of(part)
        if kind is None or kind not in PARTS:
            raise InvalidArgument(f"{where}[{i}].type", kind, f"this server supports {', '.join(PARTS)}")
        whole = checked(PARTS[kind], part, f"{where}[{i}]")
        if kind == "input_image":
            out.append(image(whole["image_url"], f"{where}[{i}].image_url"))
        else:
            out.append(text(whole["refusal" if kind == "refusal" else "text"]))
    return out
