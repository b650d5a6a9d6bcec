"""The tools that the model may call in a request, and how."""

from __future__ import annotations

from typing import Any, NamedTuple

from jengine import (
    InvalidArgument,
    SamplingParams,
    StructuredOutputs,
    after_thought,
    forced_calls,
    object_schema,
)
from jengine.serving.http.bodies import TOOLS, Body, checked
from jengine.serving.http.parameters import with_structure
from jengine.serving.parsers.events import OutputParser
from jengine.serving.parsers.forced import CallArray, NamedCall
from jengine.serving.parsers.formats import AnswerFormat


class ToolChoice(NamedTuple):
    """The tool choice of a request.

    Attributes:
        shown: the tools that the chat template shows.
        callable: the tools that may be called in the answer; empty with "none".
        forced: "required", a tool's name, or nothing.
        parallel: whether there may be several calls.
    """

    shown: list[dict[str, Any]]
    callable: list[dict[str, Any]]
    forced: str | None
    parallel: bool

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """If calls are forced, the parameters with a constraint that allows only calls.

        Raises:
            InvalidArgument: there is another constraint on the output, or parameters are no object.
        """
        structure = self.structure(None)
        return params if structure is None else with_structure(params, "tool_choice", structure)

    def structure(self, inside: bool | None) -> StructuredOutputs | None:
        """The constraint that allows only calls; None if none are forced.

        Args:
            inside: see `after_thought`; None: the model does not think first.
        """
        if self.forced is None:
            return None
        schemas = {
            tool["function"]["name"]: _schema(f"structured_outputs[{i}]", tool)
            for i, tool in enumerate(self.shown)
        }
        if self.forced == "required":
            return forced_calls(schemas, self.parallel, inside)
        named = StructuredOutputs(json=schemas[self.forced])
        return named if inside is None else after_thought(named, inside)

    def forced_parser(self) -> OutputParser | None:
        """A parser for output under this constraint."""
        if self.forced is None:
            return None
        return CallArray() if self.forced == "required" else NamedCall(self.forced)


def read_tools(body: Body, form: AnswerFormat, shown: bool) -> ToolChoice:
    """Reads the tools and the tool choice of a body.

    Args:
        shown: whether the chat template shows tools.

    Raises:
        InvalidArgument: naming the field.
    """
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidArgument("tool_choice", choice, "needs tools")
        return ToolChoice([], [], None, True)
    checked(TOOLS, tools, "tools")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidArgument("tools", names, "must have different names")
    parallel = body.get("parallel_tool_calls", True)
    if choice == "none":
        return ToolChoice(tools, [], None, parallel)
    if choice in (None, "auto"):
        if not shown:
            limit = (
                "the model's chat template has no tools, so the model cannot choose; use required or a tool's"
                " name, or none"
            )
            raise InvalidArgument("tool_choice", choice or "auto", limit)
        if not form.tools:
            limit = (
                "the format of this model's tool calls is unknown; use required, none or a tool's name (or"
                " --tool-call-parser)"
            )
            raise InvalidArgument("tool_choice", choice, limit)
        return ToolChoice(tools, tools, None, parallel)
    if choice == "required":
        return ToolChoice(tools, tools, choice, parallel)
    if choice.get("type") != "function":
        raise InvalidArgument("tool_choice.type", choice.get("type"), "must be function")
    name = choice["function"]["name"]
    if name not in names:
        raise InvalidArgument(
            "tool_choice.function.name", name, f"must be one of the tools: {', '.join(names)[:200]}"
        )
    return ToolChoice(tools, tools, name, parallel)


def _schema(field: str, tool: dict[str, Any]) -> dict[str, Any]:
    given = tool["function"].get("parameters")
    return object_schema(field, given or {"properties": {}, "additionalProperties": False})
