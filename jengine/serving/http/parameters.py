"""Converts bodies to sampling parameters, and reads what they say about thinking and tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jengine import InvalidArgument, SamplingParams, StructuredOutputs, Tokenizer
from jengine.serving.grpc.conversions import with_beams
from jengine.serving.http.bodies import TOOLS, Body, checked
from jengine.serving.http.policy import CHAT
from jengine.serving.http.turns import type_of
from jengine.serving.parsers.events import OutputParser
from jengine.serving.parsers.formats import AnswerFormat
from jengine.serving.parsers.json_calls import CallArray, NamedCall
from jengine.spi import (
    GenerationParams,
    after_thought,
    calls_or_text,
    can_bound,
    forced_calls,
    forced_in_channels,
    object_schema,
    plain_calls_or_text,
)

EXCLUSIVE = "structured_outputs already constrains the output"
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
    beams = ("use_beam_search", "length_penalty")
    return with_beams(fields | {name: body.get(name) for name in beams if name in body.fields}, default)


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
    form = body.get("response_format")
    # it is for answers that are text; a forced call excludes these
    if form is not None and form["type"] != "text" and not forces_calls(body.get("tool_choice")):
        if "structured_outputs" in fields:
            raise InvalidArgument("response_format", form, EXCLUSIVE)
        has_schema = form["type"] == "json_schema"
        schema = form["json_schema"].get("schema", {}) if has_schema else {"type": "object"}
        fields["structured_outputs"] = StructuredOutputs(json=schema)
    return default.clone(**fields)


def forces_calls(tool_choice: object) -> bool:
    """Whether the field tool_choice makes every answer a call."""
    return tool_choice not in (None, "none", "auto")


def names_of(body: Body) -> dict[str, str]:
    """This body's names of fields that jengine's errors call differently; see HttpCall."""
    names = {}
    if "messages" in body.fields and "prompt" not in body.fields:
        names["prompt"] = "messages"
    if body.get("response_format") is not None:
        names["structured_outputs"] = "response_format"
    if forces_calls(body.get("tool_choice")):
        names["structured_outputs"] = "tools"
    if body.get("max_completion_tokens") is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.get("top_logprobs") is not None:
        names["logprobs"] = "top_logprobs"
    return names


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
        if (structure := self.structure(None)) is None:
            return params
        if params.structured_outputs is not None:
            raise InvalidArgument("tool_choice", self.forced, EXCLUSIVE)
        return params.clone(structured_outputs=structure)

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
        # a schema that llguidance cannot read, or only in part, must not prevent answers that are text
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
        template: the client's, or the name of one of the model's; None: the model's. A client's is only
            searched for the word: it is parsed later, in a sandbox.
    """
    templates = tokenizer.chat_templates
    if template is not None and template not in templates:
        return "tools" in template
    used = templates.get(template or "tool_use") or templates.get("default")
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
        if forces_calls(choice):
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
