"""Tools of the Responses API as functions of /v1/chat/completions, and their calls back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jengine import InvalidArgument, StructuredOutputs
from jengine.serving.http.bodies import checked
from jengine.serving.http.policy import RESPONSES, log_accepted, members, values
from jengine.serving.http.responses.types import ALLOWED_TOOLS, NAMED_TOOL, TOOLS
from jengine.serving.http.turns import type_of

HOSTED = values(RESPONSES, "accepted", "tools")
WITHOUT_EFFECT = members(RESPONSES, "accepted", "tools")
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
            return text if isinstance(text, str) else arguments
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
    return {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }


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
