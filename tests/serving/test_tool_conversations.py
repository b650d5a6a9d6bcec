"""Conversations with jengine's own answers, in each format of calls, given to each template: the prompt has
every text, call and result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from jengine import InvalidArgument, Tokenizer, chat_prompt
from jengine.serving.http.blocks import Blocks
from jengine.serving.http.chat_service import call_id
from jengine.serving.http.messages.body import conversation as from_messages
from jengine.serving.http.responses.body import conversation as from_responses
from jengine.serving.parsers.events import joined
from jengine.serving.parsers.formats import TOOL_FORMATS
from jengine.serving.parsers.tagged import DEEPSEEK, KIMI
from jengine.text.chat_template import ChatTemplate
from tests.text import chat_templates, tool_templates
from tests.text.conftest import byte_level

TEMPLATES = tool_templates.ALL | chat_templates.ALL
Calls = list[tuple[str, dict[str, Any]]]
PARAMETERS = {"city": frozenset({"string"}), "days": frozenset({"integer"})}
CODE = "\n```json\n%s\n```"
TOOLS = {"weather": PARAMETERS, "news": PARAMETERS}


def _json(calls: Calls, form: str) -> list[str]:
    return [form % (name, json.dumps(arguments)) for name, arguments in calls]


def _tagged(calls: Calls, call: str, parameter: str, end: str) -> str:
    return "".join(
        call % name + "".join(parameter % (key, value) for key, value in arguments.items()) + end
        for name, arguments in calls
    )


def _python(calls: Calls) -> str:
    return ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )


# what a model writes, by the parser's name: a text, if the format has one before calls, and the calls
WRITTEN: dict[str, Callable[[str, Calls], str]] = {
    "deepseek": lambda text, calls: (
        text
        + DEEPSEEK.begin
        + "".join(
            _json(
                calls, f"{DEEPSEEK.call}function{DEEPSEEK.separator}%s\n```json\n%s\n```{DEEPSEEK.call_end}"
            )
        )
        + DEEPSEEK.end
    ),
    "glm45": lambda text, calls: (
        text
        + _tagged(
            calls, "\n<tool_call>%s", "\n<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>", "\n</tool_call>"
        )
    ),
    "harmony": lambda text, calls: (
        f"<|channel|>commentary<|message|>{text}<|end|>"
        + "".join(
            _json(calls, "<|start|>assistant to=functions.%s<|channel|>commentary json<|message|>%s<|call|>")
        )
    ),
    "hermes": lambda text, calls: (
        text + "\n".join(_json(calls, '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'))
    ),
    "kimi_k2": lambda text, calls: (
        text
        + KIMI.begin
        + "".join(_json(calls, f"{KIMI.call}functions.%s:0{KIMI.separator}%s{KIMI.call_end}"))
        + KIMI.end
    ),
    "llama3_json": lambda text, calls: "; ".join(_json(calls, '{"name": "%s", "parameters": %s}')),
    "minimax_m2": lambda text, calls: (
        text
        + "<minimax:tool_call>"
        + _tagged(calls, '<invoke name="%s">', '<parameter name="%s">%s</parameter>', "</invoke>")
        + "</minimax:tool_call>"
    ),
    "mistral": lambda text, calls: (
        text + "[TOOL_CALLS][" + ", ".join(_json(calls, '{"name": "%s", "arguments": %s}')) + "]"
    ),
    "pythonic": lambda text, calls: f"[{_python(calls)}]",
    "qwen3_coder": lambda text, calls: (
        text
        + _tagged(
            calls,
            "<tool_call>\n<function=%s>\n",
            "<parameter=%s>\n%s\n</parameter>\n",
            "</function>\n</tool_call>",
        )
    ),
}


def answer(form: str, text: str, calls: Calls) -> dict[str, Any]:
    """What a client gets, and sends back, for what a model has written."""
    parser = TOOL_FORMATS[form].parser(TOOLS)
    blocks = Blocks(joined([*parser.push(WRITTEN[form](text, calls)), *parser.finish()]))
    read = [(block.name, json.loads(block.text)) for block in blocks.all if block.kind == "call"]
    assert read == calls, "the parser does not read the format"
    return {
        "role": "assistant",
        "content": blocks.text("text") or None,
        "tool_calls": [
            {"id": call_id(), "type": "function", "function": {"name": block.name, "arguments": block.text}}
            for block in blocks.all
            if block.kind == "call"
        ],
    }


def turn(form: str, number: int) -> tuple[list[dict[str, Any]], list[str]]:
    """A question, two answers with calls and their results, and the last answer; and all texts in order. The
    first answer of the second turn has two calls.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Question{number}?"}]
    texts = [f"Question{number}?"]
    for place, names in ((f"{number}a", ("weather", "news")[: 1 + number % 2]), (f"{number}b", ("news",))):
        calls: Calls = [(name, {"city": f"{name}-town{place}", "days": 70 + number}) for name in names]
        said = answer(form, f"Look{place}.", calls)
        messages.append(said)
        messages += [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": f"result{place}-{call['function']['name']}",
            }
            for call in said["tool_calls"]
        ]
        texts += [said["content"]] if said["content"] else []
        for name, arguments in calls:
            texts += [name, arguments["city"], str(arguments["days"]), f"result{place}-{name}"]
    messages.append({"role": "assistant", "content": f"Answer{number}."})
    return messages, [*texts, f"Answer{number}."]


def as_items(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as the input of a response."""
    items: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": message["content"],
                }
            )
            continue
        if message["content"]:
            items.append({"type": "message", "role": message["role"], "content": message["content"]})
        items += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls", [])
        ]
    return items


def as_blocks(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as Anthropic's messages, whose system messages are apart."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = {
                "type": "tool_result",
                "tool_use_id": message["tool_call_id"],
                "content": message["content"],
            }
            found.append({"role": "user", "content": [result]})
            continue
        blocks: list[dict[str, Any]] = (
            [{"type": "text", "text": message["content"]}] if message["content"] else []
        )
        for call in message.get("tool_calls", []):
            given = json.loads(call["function"]["arguments"])
            blocks.append(
                {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}
            )
        found.append({"role": message["role"], "content": blocks})
    return found


def tokenizer_with(template: str) -> Tokenizer:
    tokenizer = Tokenizer(byte_level(), {"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_templates = {"default": ChatTemplate(template, tokenizer.special_tokens)}
    return tokenizer


def in_every_api(history: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The messages that templates get for a conversation, by API, and those with a developer's message."""
    system = {"role": "system", "content": "System rule."}
    developer = {"role": "developer", "content": "Developer rule."}
    return {
        "chat": [system, developer, *history],
        "responses": from_responses([developer, *as_items(history)], "System rule."),
        "messages": from_messages(as_blocks(history), "System rule."),
    }


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("name", TEMPLATES)
def test_three_turns(name: str, form: str) -> None:
    """The prompt is complete after each question, and after the results of its calls."""
    tokenizer = tokenizer_with(TEMPLATES[name])
    # where answers must alternate with questions, a text before calls comes with the last answer
    later = tokenizer.chat_templates["default"].traits.text_of_calls == "later"
    history: list[dict[str, Any]] = []
    texts: list[str] = []
    for number in range(3):
        more, shown = turn(form, number)
        before = [text for text in shown[:-1] if not (later and text.startswith("Look"))]
        for messages, wanted in ((more[:1], shown[:1]), (more[:-1], before)):
            for api, given in in_every_api([*history, *messages]).items():
                prompt = chat_prompt(tokenizer, given)["prompt"]
                rules = ["System rule.", *(["Developer rule."] if api != "messages" else [])]
                missing = [text for text in [*rules, *texts, *wanted] if text not in prompt]
                assert not missing, (api, prompt)
        history += more
        texts += shown


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_was_cut_off(name: str) -> None:
    """It ends no conversation: any text may be arguments."""
    tokenizer = tokenizer_with(TEMPLATES[name])
    for arguments in ('{"city": "Bonn-to', "no JSON", "[1, 22]", '"quoted"', "5555", "", None):
        call = {"id": call_id(), "type": "function", "function": {"name": "weather", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "broken"}
        more = [{"role": "assistant", "content": None}, {"role": "user", "content": "Again."}]
        messages = [{"role": "user", "content": "Rain?"}, said, result, *more]
        prompt = chat_prompt(tokenizer, messages)["prompt"]
        plain = prompt.replace("\\", "").replace('"', "")
        assert all(word in plain for word in re.findall(r"[\w-]+", arguments or "")), (arguments, prompt)
        assert "weather" in prompt and "broken" in prompt and "Again." in prompt and "None" not in prompt


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_cannot_be_continued(name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    for content in (None, "Look."):
        said = {"role": "assistant", "content": content, "tool_calls": [call]}
        with pytest.raises(
            InvalidArgument, match="continue_final_message=True: the last message has tool_calls"
        ):
            chat_prompt(
                tokenizer_with(TEMPLATES[name]),
                [{"role": "user", "content": "Rain?"}, said],
                continue_final_message=True,
            )


def test_every_format_is_tried() -> None:
    assert WRITTEN.keys() == TOOL_FORMATS.keys()
