"""Gives a chat template a conversation in the form that the template was written for, so that it loses
nothing of it. Plain data in, plain data out.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jengine.text.template_traits import TAGS, Conversation, TemplateTraits

Message = dict[str, Any]
Content = str | list[dict[str, Any]] | None

INSTRUCTIONS = ("system", "developer")
REASONING = "reasoning_content"  # of an answer, in a conversation that is not adapted yet
GAP = "\n\n"  # between the texts of joined messages
RESULT, USE = "Result of the call:", "Answer the question with it."  # otherwise small models repeat the call
LETTERS = string.ascii_letters + string.digits
MOST_CONTAINERS = 2**17  # of a call's arguments that are read; each takes at least a hundred bytes


def adapt_messages(messages: Conversation, traits: TemplateTraits) -> Conversation:
    """The conversation for a template with these traits. A role that it does not show becomes another one,
    and messages that it shows only together are joined.

    Args:
        messages: as `jengine.api.chat.checked` returns them.
    """
    messages = [_with_name(message, traits) for message in messages]
    messages = _with_instructions(messages, traits)
    out = _Turns(traits).of([*_joined_answers(messages, traits)])
    if traits.consecutive_users:
        return out
    return [*_joined_pairs(out, lambda last, message: last["role"] == message["role"] == "user")]


def _with_name(message: Message, traits: TemplateTraits) -> Message:
    """A speaker's name as the beginning of the text, where the template does not show it."""
    name, role = message.get("name"), message["role"]
    if not name or role == "tool" or role in traits.names or not message.get("content"):
        return message
    return {**message, "content": joined(f"{name}:", message["content"], gap=" ")}


# --- instructions ---------------------------------------------------------------------------------


def _with_instructions(messages: Conversation, traits: TemplateTraits) -> Conversation:
    """System and developer messages in the roles and places that the template shows."""
    shown = {"system": traits.system, "developer": traits.developer}
    instructions = [message for message in messages if message["role"] in INSTRUCTIONS]
    alone = len(instructions) == 1 and instructions[0] is messages[0]
    if not instructions or (alone and shown[instructions[0]["role"]]):
        return messages
    in_place = traits.several_systems and (
        traits.several_developers or all(message["role"] == "system" for message in instructions)
    )
    if in_place:
        return messages
    if traits.several_systems:
        return [
            {**message, "role": "system"} if message["role"] == "developer" else message
            for message in messages
        ]
    content = joined(*(message["content"] for message in instructions))
    others = [message for message in messages if message["role"] not in INSTRUCTIONS]
    role = next((role for role in (instructions[0]["role"], *INSTRUCTIONS) if shown[role]), None)
    if role is not None:
        return [{**instructions[0], "role": role, "content": content}, *others]
    at = next((i for i, message in enumerate(others) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": content}, *others]
    first = {**others[at], "content": joined(content, others[at]["content"])}
    return [*others[:at], first, *others[at + 1 :]]


def _joined_answers(messages: Conversation, traits: TemplateTraits) -> Iterator[Message]:
    """Neighbouring messages of the assistant as one: where turns must alternate, after reasoning alone, and
    between calls and their results.
    """

    def belong_together(last: Message, message: Message) -> bool:
        if not last["role"] == message["role"] == "assistant":
            return False
        empty = not last["content"] and not last.get("tool_calls")
        return empty or "tool_calls" in last or not traits.consecutive_users

    return _joined_pairs(messages, belong_together)


def _joined_pairs(
    messages: Iterable[Message], belong_together: Callable[[Message, Message], bool]
) -> Iterator[Message]:
    groups: list[tuple[Message, list[Message]]] = []  # what is known of a joint message, and its parts
    for message in messages:
        if groups and belong_together(groups[-1][0], message):
            last, parts = groups[-1]
            joint = {**last, **message, "content": last["content"] or message["content"]}
            if "tool_calls" in last:
                joint["tool_calls"] = [*last["tool_calls"], *message.get("tool_calls", [])]
            parts.append(message)
            groups[-1] = joint, parts
        else:
            groups.append((message, [message]))
    for joint, parts in groups:
        if len(parts) > 1:  # all texts at once: one after the other would take quadratic time
            joint["content"] = joined(*(part["content"] for part in parts))
            if reasoning := joined(*(part.get(REASONING) for part in parts)):
                joint[REASONING] = reasoning
        yield joint


# --- calls and results ----------------------------------------------------------------------------


class _Turns:
    """Converts assistants' messages and results of one conversation."""

    def __init__(self, traits: TemplateTraits) -> None:
        self._traits = traits
        self._ids: dict[str | None, str] = {}  # by the ids of the conversation
        self._names: dict[str | None, str] = {}  # of called functions, by these ids
        self._number = 0  # of calls so far
        self._later: Content = None  # texts for the next message without calls

    def of(self, messages: Conversation) -> Conversation:
        out: Conversation = []
        answers = [
            place
            for place, message in enumerate(messages)
            if message["role"] == "assistant" and not message.get("tool_calls")
        ]
        at = 0
        while at < len(messages):
            message = messages[at]
            at += 1
            calls = message.get("tool_calls", [])
            if message["role"] == "tool":
                self._add_result(out, message)
            elif message["role"] != "assistant":
                called = bool(out) and (out[-1]["role"] == "tool" or "tool_calls" in out[-1])
                if called and not self._traits.user_after_result:
                    self._add_answer(out, {"role": "assistant", "content": ""})
                out.append(message)
            elif not calls:
                self._add_answer(out, message)
            else:
                first = at
                while at < len(messages) and messages[at]["role"] == "tool":
                    at += 1
                answered = bool(answers) and answers[-1] >= at
                self._add_turn(out, message, _in_order(messages[first:at], calls), answered)
        return out

    def _add_answer(self, out: Conversation, message: Message) -> None:
        content = joined(self._later, message["content"]) or ""
        self._later = None
        out.append(self._with_reasoning({**_without_calls(message), "content": content}))

    def _add_turn(self, out: Conversation, message: Message, results: Conversation, answered: bool) -> None:
        """Adds a message with calls, and their results. If the template shows only one call a message, each
        call becomes a message, followed by its result.
        """
        calls = message["tool_calls"]
        while self._traits.calls and not self._traits.several_calls and len(calls) > 1:
            self._add_calls(out, {**message, "tool_calls": calls[:1]}, answered)
            message, calls = {"role": "assistant", "content": None}, calls[1:]
            left = {_id_text(call.get("id")) for call in calls}
            if results and _id_text(results[0].get("tool_call_id")) not in left - {None}:
                self._add_result(out, results[0])
                results = results[1:]
        self._add_calls(out, {**message, "tool_calls": calls}, answered)
        for result in results:
            self._add_result(out, result)

    def _add_calls(self, out: Conversation, message: Message, answered: bool) -> None:
        """`answered`: whether an answer without calls follows."""
        content, calls, place = message["content"], message["tool_calls"], self._traits.text_of_calls
        if not self._traits.calls:
            text = f"[{', '.join(map(_as_text, calls))}]"
            content = joined(content, text, gap="\n")
            out.append(self._with_reasoning({**_without_calls(message), "content": content}))
            return
        if place == "current":
            place = "before" if answered else "beside"
        if content and place != "beside":
            if place == "before":
                out.append({"role": "assistant", "content": content})
            else:
                self._later = joined(self._later, content)
            content = None
        elif content and message.get(REASONING) and not self._traits.reasoning_beside_text:
            message = {**message, REASONING: joined(message[REASONING], content)}
            content = None
        called = {**message, "content": content, "tool_calls": [self._call(call) for call in calls]}
        called = self._with_reasoning(called)
        if not called["content"]:
            called["content"] = None if self._traits.no_content == "null" else ""
            if self._traits.no_content == "absent":
                del called["content"]
        out.append(called)

    def _with_reasoning(self, message: Message) -> Message:
        """The reasoning in the form that the template shows, if it shows any."""
        place = self._traits.reasoning
        if place == REASONING or not message.get(REASONING):
            return message
        message = {**message}
        reasoning = message.pop(REASONING)
        if place == "tags":
            message["content"] = joined(TAGS.format(reasoning), message["content"], gap="") or ""
        elif place is not None:
            message[place] = reasoning
        return message

    def _call(self, call: Message) -> Message:
        function, call_id = call["function"], _id_text(call.get("id"))
        name = function["name"]
        new = {**call, "function": {**function, "arguments": self._arguments(function.get("arguments"))}}
        if (fitting := self._id(call_id, name)) is not None:
            new["id"] = fitting
        if call_id is not None:
            self._names[call_id] = name
        self._number += 1
        return new

    def _id(self, call_id: str | None, name: Any) -> str | None:
        """The id of a call as the template wants it; None: as it is."""
        if self._traits.ids == "any":
            return None
        if self._traits.ids == "nine":
            fitting = nine_characters(str(self._number) if call_id is None else call_id)
        else:
            fitting = f"functions.{name}:{self._number}"
        if call_id is not None:
            self._ids[call_id] = fitting
        return fitting

    def _arguments(self, arguments: Any) -> Any:
        """A call's arguments in the template's form. Text that is no object, such as that of a call which
        was cut off, stays text where the template shows it.
        """
        value, text = arguments_of(arguments)
        if self._traits.arguments == "text":
            return text
        if value is not None:
            return value
        return text if self._traits.any_arguments else {"arguments": text}

    def _add_result(self, out: Conversation, message: Message) -> None:
        call_id = _id_text(message.get("tool_call_id"))
        name = message.get("name", "")
        if name not in ("", self._names.get(call_id)) and "tool" not in self._traits.names:
            message = {**message, "content": joined(f"{name}:", message["content"], gap=" ")}
        if self._traits.results:
            more = {}
            if call_id in self._ids:
                more["tool_call_id"] = self._ids[call_id]
            elif self._traits.ids == "nine" and call_id is not None:
                more["tool_call_id"] = nine_characters(call_id)
            if self._traits.named_results and "name" not in message:
                more["name"] = self._names.get(call_id, "")
            out.append({**message, **more})
            return
        content = joined(joined(RESULT, message["content"], gap="\n"), USE)
        last = out[-1] if out else None
        if last is not None and last.get("role") == "user":
            out[-1] = {**last, "content": joined(last["content"], content)}
        else:
            out.append({"role": "user", "content": content})


def arguments_of(arguments: Any) -> tuple[dict[str, Any] | None, str]:
    """A call's arguments as an object, None if they are none, and as text."""
    if isinstance(arguments, dict):
        return arguments, json.dumps(arguments, ensure_ascii=False)
    if arguments is None or arguments == "":
        return {}, "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if text.count("[") + text.count("{") > MOST_CONTAINERS:
        return None, text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None, text
    return value if isinstance(value, dict) else None, text


def nine_characters(text: str) -> str:
    """Nine letters or digits that depend on the text alone; the text itself, if it is so."""
    if len(text) == 9 and text.isascii() and text.isalnum():
        return text
    number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest())
    out = ""
    for _ in range(9):
        number, letter = divmod(number, len(LETTERS))
        out += LETTERS[letter]
    return out


def _id_text(value: Any) -> str | None:
    """An id as text, whatever a client has sent."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


def joined(*contents: Content, gap: str = GAP) -> Content:
    """The contents of messages as one."""
    filled = [content for content in contents if content]
    texts = [content for content in filled if isinstance(content, str)]
    if len(texts) == len(filled):
        return gap.join(texts) if texts else contents[-1]
    return [part for content in filled for part in _parts(content)]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _in_order(results: Conversation, calls: list[Message]) -> Conversation:
    """Results in the order of their calls, since not every template shows ids."""
    places = {_id_text(call.get("id")): place for place, call in enumerate(calls)}
    return sorted(results, key=lambda result: places.get(_id_text(result.get("tool_call_id")), len(calls)))


def _without_calls(message: Message) -> Message:
    """Without the key, which some templates take for calls although its list is empty."""
    return {name: value for name, value in message.items() if name != "tool_calls"}


def _as_text(call: Message) -> str:
    """A call in the form of `call_array`."""
    function = call["function"]
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{{"name": {name}, "parameters": {arguments_of(function.get("arguments"))[1]}}}'
