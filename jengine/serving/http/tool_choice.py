"""The tools that the model may call in a request, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jengine import InvalidArgument, SamplingParams, StructuredOutputs, Tokenizer
from jengine.serving.http.bodies import TOOLS, Body, checked
from jengine.serving.http.parameters import with_structure
from jengine.serving.http.policy import CHAT
from jengine.serving.http.turns import type_of
from jengine.serving.parsers.events import OutputParser
from jengine.serving.parsers.formats import AnswerFormat
from jengine.serving.parsers.json_calls import CallArray, NamedCall
from jengine.spi import (
    after_thought,
    calls_or_text,
    forced_calls,
    forced_in_channels,
    object_schema,
    plain_calls_or_text,
)

LENIENT = {"lenient": True, "coerce_one_of": True}  # ignores what llguidance does not know of a schema


class ToolChoice(NamedTuple):
    """The tool choice of a request.

    Attributes:
        shown: the tools in the prompt.
        callable: the tools that may be called in the answer; empty with "none".
        forced: "required", a tool's name, or nothing.
        parallel: whether there may be several calls.
        plain: whether the chat template has no tools, or the format of its calls is unknown, so that the
            definitions are text, and calls are JSON.
        grammars: by the names of tools, of input that is text. A call follows it if that tool is forced.
    """

    shown: list[dict[str, Any]]
    callable: list[dict[str, Any]]
    forced: str | None
    parallel: bool
    plain: bool = False
    grammars: Mapping[str, StructuredOutputs] = {}

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
        if self.forced == "required":
            return forced_calls(self._schemas(), self.parallel, inside)
        named = self._input(self.forced)
        return named if inside is None else after_thought(named, inside)

    def in_channels(self) -> StructuredOutputs | None:
        """The constraint that allows only calls in the format harmony, after reasoning; None if none are
        forced, or the prompt does not show the tools in this format.
        """
        if self.forced is None or self.plain:
            return None
        schemas = self._schemas()
        if self.forced == "required":
            return forced_in_channels(schemas)
        return forced_in_channels({self.forced: schemas[self.forced]}, self._input(self.forced))

    def _input(self, name: str) -> StructuredOutputs:
        """The constraint on the input of a tool."""
        return self.grammars.get(name) or StructuredOutputs(json=self._schemas()[name])

    def or_text(self, what: StructuredOutputs, form: AnswerFormat, inside: bool | None) -> StructuredOutputs:
        """The constraint that allows calls, or text that follows another constraint.

        Raises:
            InvalidArgument: there is no grammar of the model's calls.
        """
        calls = "plain" if self.plain else form.calls
        if calls is None:
            limit = (
                "the format of this model's tool calls has no grammar, so that an answer in another format"
                " excludes calls; use none, required or a tool's name"
            )
            raise InvalidArgument("tool_choice", "auto", limit)
        return calls_or_text(calls, self._schemas(), self.parallel, what, inside)

    def or_any_text(self, inside: bool | None) -> StructuredOutputs:
        """The constraint that makes valid calls of what begins as a plain call."""
        # a schema that llguidance does not know entirely must not prevent answers that are text
        schemas = {name: {"x-guidance": LENIENT, **schema} for name, schema in self._schemas().items()}
        return plain_calls_or_text(schemas, self.parallel, inside)

    def _schemas(self) -> dict[str, dict[str, Any]]:
        """The parameters of each tool that may be called."""
        return {
            tool["function"]["name"]: _schema(f"tools[{i}]", tool) for i, tool in enumerate(self.callable)
        }

    def forced_parser(self) -> OutputParser | None:
        """A parser for output under this constraint."""
        if self.forced is None:
            return None
        return CallArray() if self.forced == "required" else NamedCall(self.forced)


def shows_tools(tokenizer: Tokenizer, template: str | None) -> bool:
    """Whether the chat template shows tools.

    Args:
        template: the client's own; None: the model's. A client's is only searched for the word: it is parsed
            later, in a sandbox.
    """
    if template is not None:
        return "tools" in template
    templates = tokenizer.chat_templates
    used = templates.get("tool_use") or templates.get("default")
    return used is None or "tools" in used.names  # without a template, the request fails later


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
    for i, tool in enumerate(tools):
        if (kind := type_of(tool)) not in (None, "function"):
            raise InvalidArgument(f"tools[{i}].type", kind, CHAT["error"]["tools.type"])
    checked(TOOLS, tools, "tools")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidArgument("tools", names, "must have different names")
    parallel = body.get("parallel_tool_calls", True)
    if choice == "none":
        return ToolChoice(tools if shown else [], [], None, parallel)
    if choice in (None, "auto"):
        return ToolChoice(tools, tools, None, parallel, not (shown and form.tools))
    if choice == "required":
        return ToolChoice(tools, tools, choice, parallel, not shown)
    if choice.get("type") != "function":
        raise InvalidArgument("tool_choice.type", choice.get("type"), "must be function")
    name = choice["function"]["name"]
    if name not in names:
        raise InvalidArgument(
            "tool_choice.function.name", name, f"must be one of the tools: {', '.join(names)[:200]}"
        )
    return ToolChoice(tools, tools, name, parallel, not shown, body.get("tool_grammars", {}))


def _schema(field: str, tool: dict[str, Any]) -> dict[str, Any]:
    parameters = tool["function"].get("parameters")
    return object_schema(field, parameters or {"properties": {}, "additionalProperties": False})
