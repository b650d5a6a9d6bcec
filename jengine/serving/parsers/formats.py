"""Detects the format of tool calls and reasoning: by options, the tokenizer's response_template, or the chat
template.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Container, Mapping
from typing import Any

from jengine import ModelError, Tokenizer
from jengine.serving.parsers.events import (
    END,
    Arguments,
    Content,
    Event,
    OutputParser,
    PlainText,
    Reasoning,
    ThinkParser,
    ToolCallStart,
    Turns,
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


TOOL_PARSERS: dict[str, Callable[[Tools], OutputParser]] = {
    "deepseek": lambda tools: MarkedCalls(DEEPSEEK, tools),
    "glm45": lambda tools: TaggedCalls(GLM, tools),
    "harmony": Harmony,
    "hermes": Hermes,
    "kimi_k2": lambda tools: MarkedCalls(KIMI, tools),
    "llama3_json": LlamaJson,
    "minimax_m2": lambda tools: TaggedCalls(MINIMAX, tools),
    "mistral": Mistral,
    "pythonic": Pythonic,
    "qwen3_coder": lambda tools: TaggedCalls(QWEN_CODER, tools),
}
MARKS = (  # markers in chat templates; the first one found decides
    ("<arg_key>", "glm45"),
    (MINIMAX.section, "minimax_m2"),
    (QWEN_CODER.key, "qwen3_coder"),
    ("<|channel|>analysis", "harmony"),
    (DEEPSEEK.begin, "deepseek"),
    (KIMI.begin, "kimi_k2"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
    ("<tool_call>", "hermes"),
)

CALL_MARKS = {  # at the beginning of a call, or of all
    "deepseek": DEEPSEEK.begin,
    "kimi_k2": KIMI.begin,
    "minimax_m2": MINIMAX.section,
    **dict.fromkeys(("glm45", "hermes", "qwen3_coder"), "<tool_call>"),
}


class AnswerFormat:
    """A model's format.

    Args:
        tool_parser, reasoning_parser: as in ServerConfig.

    Attributes:
        calls: the format of tool calls, a key of TOOL_PARSERS; None: it is unknown, or described by the
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
        marked = next((name for mark, name in MARKS if mark in sources), None)
        parser_name = marked if tool_parser == "auto" else tool_parser
        self.calls = parser_name if self._template is None and parser_name in TOOL_PARSERS else None
        self._tool_parser = TOOL_PARSERS.get(parser_name or "none")
        self._reasons = END in sources if reasoning_parser == "auto" else reasoning_parser != "none"
        self._assumes_open = reasoning_parser == "deepseek_r1"  # many templates only remove earlier thoughts
        self._turns = Turns(tokenizer)
        self.tools = self._template is not None or self._tool_parser is not None
        self.shows_special_tokens = self._template is not None or parser_name in (
            "deepseek",
            "harmony",
            "kimi_k2",
            "mistral",
        )
        self.channels = self._template is None and parser_name == "harmony"
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
        is_open = open_thought(self._turns.last(prompt) if continues else prompt.rstrip()[-len(END) :])
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
        call = CALL_MARKS.get(self.calls or "", "") if types and forced is None else ""
        return rest if inside is None else ThinkParser(rest, inside, call)


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
