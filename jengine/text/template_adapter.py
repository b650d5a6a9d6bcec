"""Gives a chat template a conversation in the form that the template was written for, so that it loses
nothing of it. Plain data in, plain data out.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterable, Iterator
from typing import Any

from jengine.text.template_traits import Conversation, TemplateTraits

Message = dict[str, Any]
Content = str | list[dict[str, Any]] | None

INSTRUCTIONS = ("system", "developer")
GAP = "\n\n"  # between the texts of joined messages
RESULT = "Result of the call:"
LETTERS = string.ascii_letters + string.digits


def adapt_messages(messages: Conversation, traits: TemplateTraits) -> Conversation:
    """The conversation for a template with these traits. A role that it does not show becomes another one,
    and messages that it shows only together are joined.
    """
    turns = _Turns(traits)
    out = turns.of(_with_instructions(messages, traits))
    return out if traits.consecutive_users else [*_joined_users(out)]


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
    content: Content = None
    for message in instructions:
        content = joined(content, message["content"])
    others = [message for message in messages if message["role"] not in INSTRUCTIONS]
    role = next((role for role in (instructions[0]["role"], *INSTRUCTIONS) if shown[role]), None)
    if role is not None:
        return [{**instructions[0], "role": role, "content": content}, *others]
    at = next((i for i, message in enumerate(others) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": content}, *others]
    first = {**others[at], "content": joined(content, others[at]["content"])}
    return [*others[:at], first, *others[at + 1 :]]


def _joined_users(messages: Iterable[Message]) -> Iterator[Message]:
    last: Message | None = None
    for message in messages:
        if last is not None and last["role"] == message["role"] == "user":
            last = {**last, "content": joined(last["content"], message["content"])}
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


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
        at = 0
        while at < len(messages):
            message = messages[at]
            at += 1
            calls = _calls(message)
            if message["role"] == "tool":
                self._add_result(out, message)
            elif message["role"] != "assistant":
                out.append(message)
            elif not calls:
                content = joined(self._later, message.get("content")) or ""
                self._later = None
                out.append({**_without_calls(message), "content": content})
            elif self._traits.calls and not self._traits.several_calls and len(calls) > 1:
                first = at
                while at < len(messages) and messages[at]["role"] == "tool":
                    at += 1
                self._add_one_by_one(out, message, calls, messages[first:at])
            else:
                self._add_calls(out, message, calls)
        return out

    def _add_one_by_one(
        self, out: Conversation, message: Message, calls: list[Any], results: Conversation
    ) -> None:
        """A message for each call, followed by its result."""
        left = list(results)
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": "assistant", "content": None}
            self._add_calls(out, {**first, "tool_calls": [call]}, [call])
            call_id = call.get("id") if isinstance(call, dict) else None
            at = next((i for i, result in enumerate(left) if result.get("tool_call_id") == call_id), 0)
            if left:
                self._add_result(out, left.pop(at))
        for result in left:
            self._add_result(out, result)

    def _add_calls(self, out: Conversation, message: Message, calls: list[Any]) -> None:
        content = message.get("content")
        if not self._traits.calls:
            text = f"[{', '.join(map(_as_text, calls))}]"
            out.append({**_without_calls(message), "content": joined(content or None, text, "\n")})
            return
        if content and self._traits.text_of_calls != "beside":
            if self._traits.text_of_calls == "before":
                out.append(_without_calls(message))
            else:
                self._later = joined(self._later, content)
            message, content = _without_text(message, self._traits.text_of_calls == "before"), None
        called = {**message, "content": content, "tool_calls": [self._call(call) for call in calls]}
        if not content:
            called["content"] = None if self._traits.no_content == "null" else ""
            if self._traits.no_content == "absent":
                del called["content"]
        out.append(called)

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            return call
        function, call_id = call["function"], _id_text(call.get("id"))
        name = function.get("name")
        new = {**call, "function": {**function, "arguments": self._arguments(function.get("arguments"))}}
        if (fitting := self._id(call_id, name)) is not None:
            new["id"] = fitting
        if call_id is not None and isinstance(name, str):
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
        content = joined(RESULT, message["content"], "\n")
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


def joined(first: Content, second: Content, gap: str = GAP) -> Content:
    """The contents of two messages as one."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + gap + second
    return [*_parts(first), *_parts(second)]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _calls(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _without_calls(message: Message) -> Message:
    """Without the key, which some templates take for calls although its list is empty."""
    if not isinstance(message.get("tool_calls"), list):
        return message
    return {name: value for name, value in message.items() if name != "tool_calls"}


def _without_text(message: Message, empty: bool) -> Message:
    """Without the content. `empty`: without anything else either, since another message has it."""
    return {
        name: value for name, value in message.items() if name == "role" or not (empty or name == "content")
    }


def _as_text(call: Any) -> str:
    """A call in the form that a grammar forces where the template has no tools."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return json.dumps(call, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'{{"name": {name}, "parameters": {arguments_of(function.get("arguments"))[1]}}}'
