"""Renders conversations with a model's Jinja template, like transformers' apply_chat_template."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.gguf_file import is_gguf
from jengine.base.model_files import read_object, read_text
from jengine.text.tekken import generated_template
from jengine.text.template_adapter import INSTRUCTIONS, adapt_messages, joined
from jengine.text.template_traits import Conversation, TemplateTraits, traits_of

MOST_SOURCE = 2**20  # characters of a template
MARK = "@end-of-the-message-to-continue@ "  # the space shows whether the template trims messages


CALLS = 'a JSON array of calls and nothing else: [{"name": "...", "parameters": {...}}]'


class ChatTemplate:
    """A Jinja template for conversations. Templates come with models and are not trusted, so they run in a
    sandbox.

    Args:
        source: the template.
        special_tokens: tokens that it may use, such as {"bos_token": "<s>"}.
        file: the template's file, for errors.

    Raises:
        ModelError: it is not text, too long, or not a Jinja template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], file: object = "chat_template"
    ) -> None:
        if not isinstance(source, str):
            raise ModelError(f"a chat template must be text, not {type(source).__name__}", file=file)
        if len(source) > MOST_SOURCE:
            raise ModelError(f"has {len(source)} characters; at most {MOST_SOURCE}", file=file)
        self.source, self.special_tokens, self._file = source, special_tokens, file
        with self._invalid():
            self._tree = _environment().parse(source)
            #: all variables that the template mentions
            self.names = frozenset(name.name for name in self._tree.find_all(nodes.Name))

    @cached_property
    def compiled(self) -> Template:
        """The template, ready to be rendered. Compiling computes constant expressions, however large: like
        rendering, it runs the template.

        Raises:
            ModelError: it is not a Jinja template.
        """
        with self._invalid():
            return _environment().from_string(self.source)

    @contextmanager
    def _invalid(self) -> Iterator[None]:
        try:
            yield
        except TemplateSyntaxError as wrong:
            reason = f"line {wrong.lineno} is not a valid Jinja template: {wrong.message}"
            raise ModelError(reason, file=self._file) from None
        except RecursionError:
            reason = "is not a valid Jinja template: it is nested too deeply"
            raise ModelError(reason, file=self._file) from None

    @cached_property
    def takes_parts(self) -> bool:
        """Whether it shows messages whose content is a list of parts, with images."""
        return any(constant.value == "image" for constant in self._tree.find_all(nodes.Const))

    @cached_property
    def only_parts(self) -> bool:
        """Whether it needs such lists for all messages, since it never looks whether a content is text."""
        tests = {test.name for test in self._tree.find_all(nodes.Test)}
        return self.takes_parts and tests.isdisjoint(("string", "iterable", "sequence", "mapping"))

    @cached_property
    def traits(self) -> TemplateTraits:
        """What it does with a conversation, found by rendering short ones."""

        def shown(messages: Conversation) -> str | None:
            try:
                return self._rendered(self._in_parts(messages), {"add_generation_prompt": True})
            except InvalidArgument:
                return None

        return traits_of(shown, self.source)

    def render(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | None = None,
        tools_as_text: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation in the form that the model was trained on, with special tokens.

        Args:
            messages: with "role" and "content", plain JSON. A content is text or a list of parts:
                {"type": "text", "text": ...} and {"type": "image"}.
            add_generation_prompt: whether to end with the beginning of an answer.
            continue_final_message: whether to end inside the last message.
            tools: descriptions of tools, as JSON schemas. If the template has none, they become text.
            tool_choice: see `with_tools_as_text`.
            tools_as_text: whether tools become text in any case.
            variables: further variables. Those that the template does not mention are ignored, as in vLLM,
                since clients send the same ones to all models.

        Raises:
            InvalidArgument: the template rejects or cannot render this conversation.
        """
        original = messages
        if tools and (tools_as_text or "tools" not in self.names):
            messages, tools = with_tools_as_text(messages, tools, tool_choice), None
        if continue_final_message:
            messages = [*messages[:-1], _with_mark(messages[-1])]
        values = {"tools": tools, "add_generation_prompt": add_generation_prompt, **(variables or {})}

        def rendered(part: Conversation) -> tuple[str, Conversation]:
            part = self._in_parts(adapt_messages(part, self.traits))
            return self._rendered(part, values), part

        try:
            text, messages = rendered(messages)
        except InvalidArgument as refusal:
            added = len(messages) - len(original)  # a system message with tools
            at = max(_refused(messages, refusal.limit, rendered) - added, 0)
            raise InvalidArgument(f"messages[{at}]", original[at], refusal.limit) from None
        return _up_to_mark(text, messages) if continue_final_message else text

    def _rendered(self, messages: Conversation, variables: Mapping[str, Any]) -> str:
        known = {"tools": None, "documents": None, **self.special_tokens}
        template = self.compiled
        try:
            return template.render({**known, **variables, "messages": messages})
        except TemplateError as refusal:
            raise InvalidArgument(
                "messages", messages, f"the model's chat template rejects it: {refusal.message}"
            ) from None
        except Exception as wrong:  # expressions of the template may raise anything
            raise InvalidArgument(
                "messages", messages, f"the model's chat template fails on it: {wrong!r}"
            ) from None

    def _in_parts(self, messages: Conversation) -> Conversation:
        """Texts as lists of parts, if it needs these."""
        if not self.only_parts:
            return messages
        return [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message.get("content"), str)
            else message
            for message in messages
        ]


def given_template(template: str | Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """The template that a user gives: in a file, or as text.

    Raises:
        InvalidArgument: neither a file nor a template.
        ModelError: it is not a Jinja template, or the file cannot be read.
    """
    text = str(template)
    if not isinstance(template, Path) and any(mark in text for mark in "{}\n"):
        return _compiled(ChatTemplate(text, special_tokens))
    file = Path(text).expanduser()
    try:
        return _compiled(ChatTemplate(file.read_text(encoding="utf-8"), special_tokens, file))
    except FileNotFoundError:
        raise InvalidArgument(
            "chat_template", text, "there is no such file, and it is no Jinja template either"
        ) from None
    except (OSError, ValueError) as wrong:
        raise ModelError(f"cannot be read: {wrong}", file=file) from None


def _compiled(template: ChatTemplate) -> ChatTemplate:
    _ = template.compiled  # a user hears of mistakes before the first conversation
    return template


def load_chat_templates(folder: Path, special_tokens: Mapping[str, str]) -> dict[str, ChatTemplate]:
    """The templates of a model's folder by name. The standard one is named "default".

    They are chat_template.jinja and additional_chat_templates/NAME.jinja; otherwise chat_template in
    tokenizer_config.json, a text or a list of {"name", "template"}, or in chat_template.json, as processors
    saved it before; or those of a GGUF file. If there is only a tekken.json, mistral-common generates one, if
    it is installed.

    Raises:
        ModelError: one cannot be read.
    """
    if is_gguf(folder):
        from jengine.text.gguf_tokenizer import read_chat_templates

        return {
            name: ChatTemplate(source, special_tokens, folder)
            for name, source in read_chat_templates(folder).items()
        }
    templates: dict[str, tuple[str, Path]] = {}
    file = folder
    try:
        for file in folder / "chat_template.json", folder / "tokenizer_config.json":
            named = read_object(file).get("chat_template") if file.is_file() else None
            if isinstance(named, str):
                named = [{"name": "default", "template": named}]
            templates |= {entry["name"]: (entry["template"], file) for entry in named or []}
        for file in [
            *folder.glob("chat_template.jinja"),
            *sorted(folder.glob("additional_chat_templates/*.jinja")),
        ]:
            templates["default" if file.stem == "chat_template" else file.stem] = read_text(file), file
    except (TypeError, KeyError, AttributeError) as wrong:
        raise ModelError(f"chat_template cannot be read: {wrong!r}", file=file) from None
    tekken = folder / "tekken.json"
    if not templates and tekken.is_file() and (source := generated_template(tekken)) is not None:
        templates["default"] = source, tekken
    return {name: ChatTemplate(source, special_tokens, file) for name, (source, file) in templates.items()}


def _with_mark(message: dict[str, Any]) -> dict[str, Any]:
    """The message with MARK at the end of its content.

    Raises:
        InvalidArgument: it has calls, which would follow the continued text.
    """
    if message.get("tool_calls"):
        raise InvalidArgument(
            "continue_final_message", True, "the last message has tool_calls; only text can be continued"
        )
    content = message.get("content") or ""
    marked = content + MARK if isinstance(content, str) else [*content, {"type": "text", "text": MARK}]
    return {**message, "content": marked}


def _refused(messages: Conversation, reason: str, render: Callable[[Conversation], object]) -> int:
    """The place of a message with which a conversation begins to be refused for this reason."""
    accepted, refused = 0, len(messages)
    while refused - accepted > 1:
        size = (accepted + refused) // 2
        try:
            render(messages[:size])
            accepted = size
        except InvalidArgument as other:
            accepted, refused = (accepted, size) if other.limit == reason else (size, refused)
    return refused - 1


def _up_to_mark(text: str, messages: Conversation) -> str:
    end = text.rfind(MARK.rstrip())
    if end < 0 or MARK not in str(messages[-1].get("content")) or messages[-1].get("tool_calls"):
        limit = f"the model's chat template hides the last message (role {messages[-1].get('role')!r})"
        raise InvalidArgument("continue_final_message", True, limit)
    return text[:end] if text.startswith(MARK, end) else text[:end].rstrip()


# --- as in transformers' templates ---------------------------------------------------------------


@cache
def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        autoescape=False,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """`{% generation %}` marks text written by the model, for training. Here it only renders its content, in
    a separate scope.
    """

    tags = {"generation"}  # noqa: RUF012 (so declared by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(
            line
        )


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Like json.dumps, since Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def with_tools_as_text(
    messages: Conversation, tools: list[dict[str, Any]], tool_choice: str | None = None
) -> Conversation:
    """The conversation with the tools in its first system message, or in a new one.

    Args:
        tool_choice: "required", or the name of a tool, if a grammar forces a call: of any tool, or the
            parameters of this one. None: the model chooses.

    Raises:
        InvalidArgument: a tool is no function.
    """
    text = _instructions([_function(i, tool) for i, tool in enumerate(tools)], tool_choice)
    if messages[0]["role"] in INSTRUCTIONS:
        return [{**messages[0], "content": joined(messages[0]["content"], text)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _function(place: int, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return function
    limit = 'must be an object such as {"type": "function", "function": {"name": "f"}}'
    raise InvalidArgument(f"tools[{place}]", tool, limit)


def _instructions(functions: list[dict[str, Any]], tool_choice: str | None) -> str:
    if tool_choice not in (None, "required"):
        [function] = [function for function in functions if function["name"] == tool_choice]
        listed = json.dumps(function, ensure_ascii=False)
        form = "Answer with its parameters as a JSON object and nothing else."
        return f"Call this function:\n{listed}\n\n{form}"
    listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    if tool_choice == "required":
        form = f"Answer with {CALLS}"
    else:
        form = f"To call functions, answer with {CALLS}\nOtherwise answer with text."
    return f"You can call these functions:\n{listed}\n\n{form}"
