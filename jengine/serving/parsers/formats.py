"""Detects the format of tool calls and reasoning: by options, the tokenizer's response_template, or the chat
template.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any, NamedTuple

from jengine import ModelError, Tokenizer
from jengine.serving.parsers.events import (
    END,
    START,
    Arguments,
    Content,
    Event,
    OutputParser,
    PlainText,
    Reasoning,
    ThinkParser,
    ToolCallStart,
    clean,
    joined,
    open_thought,
)
from jengine.serving.parsers.harmony import Harmony
from jengine.serving.parsers.json_calls import parameter_types
from jengine.serving.parsers.json_formats import Hermes, LlamaJson, Mistral
from jengine.serving.parsers.pythonic import Pythonic
from jengine.serving.parsers.tagged import DEEPSEEK, GLM, KIMI, MINIMAX, QWEN_CODER, MarkedCalls, TaggedCalls

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)  # for a response_template
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
Tools = Mapping[str, Mapping[str, frozenset[str]]]  # types of parameters, by the names of tools and theirs


class ResponseTemplate:
    """Wraps the parser of transformers.

    Args:
        template: from tokenizer_config.json.
        prompt: the conversation, which may contain the answer's beginning.
        tools: as in the request; arguments are converted to the types that they declare.
    """

    def __init__(self, template: dict[str, Any], prompt: str, tools: list[dict[str, Any]]) -> None:
        from transformers.utils.chat_parsing import ResponseParser  # takes a second to import

        self._count, self._open = 0, ""  # for the open region, text that was not emitted
        self._failed = True  # if the prompt's part of the answer cannot be read
        with contextlib.suppress(*UNREADABLE):
            self._parser, self._failed = ResponseParser(template, prefix=prompt, tools=[*tools]), False

    def push(self, text: str) -> list[Event]:
        if self._failed:
            return [Content(text)] if text else []
        return self._guarded(lambda: self._parser.feed(text), text)

    def finish(self) -> list[Event]:
        return [] if self._failed else self._guarded(lambda: self._parser.finalize()[1], "")

    def _guarded(self, work: Any, text: str) -> list[Event]:
        """Treats text that the template cannot parse as content."""
        rest = self._open + text
        try:
            return joined([event for region in work() for event in self._events(region)])
        except UNREADABLE:
            self._failed = True
            return [Content(rest)] if rest else []

    def _events(self, region: dict[str, Any]) -> list[Event]:
        field, kind = region["field"], region["type"]
        if field in ("content", *THOUGHTS):
            if kind != "region_chunk" or not region["text"]:
                return []
            return [Content(region["text"]) if field == "content" else Reasoning(region["text"])]
        if field != "tool_calls":
            return []
        if kind == "region_chunk":
            self._open += region["text"]
        if kind != "region_close":
            return []
        self._open = ""
        events = call_events(region["value"], self._count)
        self._count += len(events) // 2
        return events


def call_events(value: Any, first: int) -> list[Event]:
    """Two events for each call. Raises one of UNREADABLE if it is not a call."""
    events: list[Event] = []
    for index, call in enumerate(value if isinstance(value, list) else [value], first):
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        events += [ToolCallStart(index, clean(function["name"])), Arguments(index, clean(text))]
    return events


class ToolFormat(NamedTuple):
    """A format of tool calls.

    Attributes:
        parser: makes a parser, for the tools that may be called.
        marks: in the chat templates of its models.
        begin: the marker before a call, or before all, which also ends a thought that was not closed; empty:
            none does.
        special: whether its markers are special tokens, which texts normally omit.
    """

    parser: Callable[[Tools], OutputParser]
    marks: tuple[str, ...]
    begin: str = ""
    special: bool = False


TOOL_FORMATS = {  # the first one with a mark in the chat template decides
    "glm45": ToolFormat(partial(TaggedCalls, GLM), ("<arg_key>",), "<tool_call>"),
    "minimax_m2": ToolFormat(partial(TaggedCalls, MINIMAX), (MINIMAX.section,), MINIMAX.section),
    "qwen3_coder": ToolFormat(partial(TaggedCalls, QWEN_CODER), (QWEN_CODER.key,), "<tool_call>"),
    "harmony": ToolFormat(Harmony, ("<|channel|>analysis",), special=True),
    "deepseek": ToolFormat(partial(MarkedCalls, DEEPSEEK), (DEEPSEEK.begin,), DEEPSEEK.begin, True),
    "kimi_k2": ToolFormat(partial(MarkedCalls, KIMI), (KIMI.begin,), KIMI.begin, True),
    "mistral": ToolFormat(Mistral, ("[TOOL_CALLS]",), special=True),
    "pythonic": ToolFormat(Pythonic, ("[func_name1(",)),
    "llama3_json": ToolFormat(LlamaJson, ("<|python_tag|>", '"parameters": dictionary')),
    "hermes": ToolFormat(Hermes, ("<tool_call>",), "<tool_call>"),
}


class AnswerFormat:
    """A model's format.

    Args:
        tool_parser, reasoning_parser: as in ServerConfig.

    Attributes:
        calls: the format of tool calls, a key of TOOL_FORMATS; None: it is unknown, or described by the
            response_template.
        tools: whether tool calls can be parsed.
        shows_special_tokens: whether their markers are special tokens, which texts normally omit.
        channels: whether answers consist of channels, whose markers are special tokens too.
        marks_thoughts: whether answers may have thoughts, in any form.
    """

    def __init__(
        self, tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> None:
        sources = " ".join(template.source for template in tokenizer.chat_templates.values())
        self._template = (
            _response_template(tokenizer) if (tool_parser, reasoning_parser) == ("auto", "auto") else None
        )
        marked = [name for name, form in TOOL_FORMATS.items() if any(mark in sources for mark in form.marks)]
        name = next(iter(marked), "none") if tool_parser == "auto" else tool_parser
        form = TOOL_FORMATS.get(name)
        self._tool_parser = None if form is None else form.parser
        self.calls = name if self._template is None and form is not None else None
        self._begin = "" if self._template is not None or form is None else form.begin
        self._reasons = END in sources if reasoning_parser == "auto" else reasoning_parser != "none"
        self._assumes_open = reasoning_parser == "deepseek_r1"  # many templates only remove earlier thoughts
        added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
        marks = [re.escape(token) for token in added if token.strip() and token not in (START, END)]
        self._turn = re.compile("|".join(marks) or "(?!)")  # what templates write around messages
        self.tools = self._template is not None or form is not None
        self.shows_special_tokens = self._template is not None or (form is not None and form.special)
        self.channels = self._template is None and name == "harmony"
        self.marks_thoughts = self.channels or self._template is not None or self._reasons

    def reasoning(self, prompt: str, continues: bool = True) -> bool | None:
        """Whether the answer to this prompt begins within reasoning; None if there is no reasoning, or it is
        unknown.

        Args:
            continues: whether the answer continues a message, which may have a thought. Otherwise the prompt
                may only end with a tag.
        """
        if self._template is not None or not self._reasons:
            return None
        last = max((mark.end() for mark in self._turn.finditer(prompt)), default=0) if continues else None
        is_open = open_thought(prompt.rstrip()[-len(END) :] if last is None else prompt[last:])
        if is_open is None:  # the model begins one, if it thinks
            return self._assumes_open
        return True if is_open else None

    def parser(
        self,
        prompt: str,
        tools: list[dict[str, Any]],
        thinks: bool = True,
        forced: OutputParser | None = None,
        continues: bool = True,
        plain: bool = False,
        raw: Container[str] = (),
    ) -> OutputParser:
        """A parser for one completion.

        Args:
            prompt: the prompt's text.
            tools: tools that may be called; empty: none.
            thinks: whether the model may reason; False if a grammar applies from the first token on.
            forced: the parser for text after the reasoning, if a grammar forces calls. In channels, these
                have the model's format, unless the model may not reason.
            continues: see `reasoning`.
            plain: whether calls may also be a JSON array, since the chat template has no tools.
            raw: tools whose input is text, not JSON, if a call of them is forced.
        """
        plain = plain and bool(tools)
        if self._template is not None and thinks and forced is None and not plain:
            return ResponseTemplate(self._template, prompt, tools)
        types = {
            tool["function"]["name"]: parameter_types(tool["function"].get("parameters")) for tool in tools
        }
        if self.channels and (forced is None or thinks):
            return Harmony(types, raw)
        calls = self._tool_parser(types) if self._tool_parser is not None and types else PlainText()
        calls = LlamaJson(types, calls) if plain else calls
        rest = calls if forced is None else forced
        inside = self.reasoning(prompt, continues) if thinks else None
        begin = self._begin if types and forced is None else ""
        return rest if inside is None else ThinkParser(rest, inside, begin)


def _response_template(tokenizer: Tokenizer) -> dict[str, Any] | None:
    if tokenizer.folder is None or not (file := tokenizer.folder / "tokenizer_config.json").is_file():
        return None
    template = json.loads(file.read_text(encoding="utf-8")).get("response_template")
    if not isinstance(template, dict):
        return None
    try:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        load_response_template(template)
    except (ImportError, ValueError) as wrong:  # transformers without support for it, or an invalid template
        raise ModelError(
            f"response_template cannot be used: {wrong}; name the parsers (--tool-call-parser)", file=file
        ) from None
    return template
