"""What a chat template does with a conversation, found by rendering short conversations with markers in their
fields, and looking which markers come out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

Conversation = list[dict[str, Any]]
Render = Callable[[Conversation], str | None]  # None: the template rejects the conversation
NoContent = Literal["null", "empty", "absent"]
Arguments = Literal["object", "text"]
Ids = Literal["any", "nine", "named"]
TextOfCalls = Literal["beside", "current", "before", "later"]
Thoughts = Literal["reasoning_content", "reasoning", "thinking", "tags"]

USER, USER2, SYSTEM, SYSTEM2, SYSTEM3, DEVELOPER, DEVELOPER2 = (
    f"jq{name}qj" for name in ("ua", "ub", "sa", "sb", "sc", "da", "db")
)
ANSWER, ANSWER2, RESULT, RESULT2 = (f"jq{name}qj" for name in ("aa", "ab", "ra", "rb"))
NAME, KEY, VALUE, VALUE2, CUT = "jqnameqj", "jqkeyqj", "jqvaluea", "jqvalueb", "jqcut"
THOUGHT, SPEAKER = "jqthoughtqj", "jqspeakerqj"
TAGS = "<think>\n{}\n</think>\n\n"  # around reasoning in a text
NO_CONTENT: tuple[NoContent, ...] = ("null", "empty", "absent")
ARGUMENTS: tuple[Arguments, ...] = ("object", "text")
IDS: tuple[Ids, ...] = ("any", "nine", "named")
# names of an answer's reasoning, the first of which jengine uses
THOUGHTS: tuple[Thoughts, ...] = ("reasoning_content", "reasoning", "thinking")
SPEAKERS = ("system", "developer", "user", "assistant")  # roles whose messages may have a name


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template does. Plain data.

    Attributes:
        system, developer: whether it shows a first message of this role.
        several_systems: whether it shows system messages at any place.
        several_developers: whether it shows developer messages at any place, beside a system message.
        consecutive_users: whether it shows a user's message after another one.
        user_after_result: whether it shows a user's message after the result of a call, without an answer.
        calls: whether it shows an assistant's tool calls.
        results: whether it shows messages of the role tool.
        named_results: whether these need the function's name.
        text_of_calls: where it shows the text of a message with calls: beside them; beside them up to the
            answer, then in a message before; in a message before; or only in a later message, since answers
            without calls must alternate with questions.
        several_calls: whether it shows several calls of a message.
        no_content: what stands for the missing text of a message with calls.
        arguments: the form of a call's arguments.
        any_arguments: whether it shows arguments that are text of any form.
        ids: the form of calls' ids: any, nine letters or digits (Mistral), or functions.NAME:NUMBER, from
            which alone the model learns a function's name (Kimi).
        reasoning: the field of which it shows an answer's reasoning, or "tags": as text between <think> and
            </think>. None: it shows none.
        reasoning_beside_text: whether a message with calls may have both.
        names: the roles of which it shows a message's name.
    """

    system: bool = True
    developer: bool = True
    several_systems: bool = True
    several_developers: bool = True
    consecutive_users: bool = True
    user_after_result: bool = True
    calls: bool = True
    results: bool = True
    named_results: bool = False
    text_of_calls: TextOfCalls = "beside"
    several_calls: bool = True
    no_content: NoContent = "null"
    arguments: Arguments = "object"
    any_arguments: bool = False
    ids: Ids = "any"
    reasoning: Thoughts | None = None
    reasoning_beside_text: bool = True
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _CallForm:
    """One form of messages with calls, as TemplateTraits describes them."""

    no_content: NoContent
    arguments: Arguments
    ids: Ids
    results: bool
    named_results: bool

    def turn(self, values: list[str], results: list[str], text: str | None = None) -> Conversation:
        """A question, a message with a call for each value, and the calls' results."""
        ids = [self._id(number) for number in range(len(values))]
        calls = [self._call(name, value) for name, value in zip(ids, values, strict=True)]
        message: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": calls}
        if text is None and self.no_content == "empty":
            message["content"] = ""
        if text is None and self.no_content == "absent":
            del message["content"]
        turn = [_message("user", USER), message]
        name = {"name": NAME} if self.named_results else {}
        if self.results:
            turn += [
                {**_message("tool", result), "tool_call_id": call_id, **name}
                for call_id, result in zip(ids, results, strict=True)
            ]
        return turn

    def _call(self, call_id: str, value: str) -> dict[str, Any]:
        arguments: Any = {KEY: value}
        if value == CUT:
            arguments = CUT + '{"'
        elif self.arguments == "text":
            arguments = json.dumps(arguments)
        return {"id": call_id, "type": "function", "function": {"name": NAME, "arguments": arguments}}

    def _id(self, number: int) -> str:
        match self.ids:
            case "any":
                return f"c{number}"  # of any length
            case "nine":
                return f"{number:09}"
            case "named":
                return f"functions.{NAME}:{number}"


def traits_of(render: Render, source: str) -> TemplateTraits:
    """The traits of the template with this source; `render` must not adapt what it is given."""

    def shows(conversation: Conversation, *marks: str) -> bool:
        text = render(conversation)
        return text is not None and all(mark in text for mark in marks)

    user, answer = _message("user", USER), _message("assistant", ANSWER)
    known = shows([user], USER)  # otherwise it is for other conversations, which stay as they are
    traits = _of_roles(shows) if known else TemplateTraits(names=frozenset(SPEAKERS))
    form, text = _CallForm("null", "object", "any", True, False), ""
    if "tool_calls" in source:
        form, text = _best_form(render, plain=(render([user, answer]) or "").count("None"))
    if VALUE not in text and NAME not in text:
        # many show messages of any role, but were not written for results
        results = "tool" in source and shows([user, answer, _message("tool", RESULT)], RESULT)
        reasoning = _reasoning(shows, [user, answer], source) if known else None
        return replace(traits, calls=not known, results=results or not known, reasoning=reasoning)
    values = [mark for mark in (VALUE, VALUE2) if VALUE in text] or [NAME]  # some show names alone
    answers = [RESULT, RESULT2] if form.results else []
    reasoning = _reasoning(shows, form.turn([VALUE], [RESULT]), source)
    together = form.turn([VALUE], [RESULT], ANSWER)
    *turn, result = form.turn([VALUE], [RESULT])
    names = {"tool"} if shows([*turn, {**result, "name": SPEAKER}], SPEAKER) else set()
    return replace(
        traits,
        user_after_result=not form.results
        or shows([*form.turn([VALUE], [RESULT]), _message("user", USER2)], RESULT, USER2),
        results=form.results or not known,
        named_results=form.named_results,
        text_of_calls=_text_of_calls(render, form, values[0]),
        several_calls=shows(form.turn([VALUE, VALUE2], [RESULT, RESULT2]), *values, *answers),
        no_content=form.no_content,
        arguments=form.arguments,
        any_arguments=shows(form.turn([CUT], [RESULT]), CUT),
        ids=form.ids,
        names=traits.names | names,
        reasoning=reasoning,
        reasoning_beside_text=reasoning is None or shows(_with_thought(together, reasoning), THOUGHT, ANSWER),
    )


def _of_roles(shows: Callable[..., bool]) -> TemplateTraits:
    user, user2, answer = _message("user", USER), _message("user", USER2), _message("assistant", ANSWER)
    system, developer = _message("system", SYSTEM), _message("developer", DEVELOPER)
    system2, system3 = _message("system", SYSTEM2), _message("system", SYSTEM3)
    developer2 = _message("developer", DEVELOPER2)
    several = [system, system2, user, answer, system3, user2]
    mixed = [system, developer, user, answer, developer2, user2]
    return TemplateTraits(
        system=shows([system, user], SYSTEM, USER),
        developer=shows([developer, user], DEVELOPER, USER),
        several_systems=shows(several, SYSTEM, SYSTEM2, SYSTEM3, USER, USER2),
        several_developers=shows(mixed, SYSTEM, DEVELOPER, DEVELOPER2, USER, USER2),
        consecutive_users=shows([user, user2], USER, USER2),
        names=frozenset(
            role
            for role, conversation in zip(
                SPEAKERS, ([system, user], [developer, user], [user], [user, answer, user2]), strict=True
            )
            if shows(
                [
                    {**message, "name": SPEAKER} if message["role"] == role else message
                    for message in conversation
                ],
                SPEAKER,
            )
        ),
    )


def _reasoning(shows: Callable[..., bool], conversation: Conversation, source: str) -> Thoughts | None:
    """How the template shows the reasoning of the second message, which follows the last question. A template
    that reads tags drops them later.
    """
    for form in THOUGHTS:
        if shows(_with_thought(conversation, form), THOUGHT):
            return form
    tagged = _with_thought(conversation, "tags")
    past = [*tagged, _message("assistant", ANSWER2), _message("user", USER2)]
    reads = "</think>" in source and shows(tagged, THOUGHT) and shows(past, USER2)
    return "tags" if reads and not shows(past, THOUGHT) else None


def _with_thought(conversation: Conversation, form: Thoughts) -> Conversation:
    first, message, *rest = conversation
    if form == "tags":
        message = {**message, "content": TAGS.format(THOUGHT) + (message.get("content") or "")}
    else:
        message = {**message, form: THOUGHT}
    return [first, message, *rest]


def _best_form(render: Render, plain: int) -> tuple[_CallForm, str]:
    """The first form of which the template shows most, and its text.

    Args:
        plain: how often it writes None without calls.
    """
    best, text, highest = _CallForm("null", "object", "any", True, False), "", -1
    for results, named in ((True, False), (True, True), (False, False)):
        for forms in product(IDS, ARGUMENTS, NO_CONTENT):
            form = _CallForm(forms[2], forms[1], forms[0], results, named)
            shown = render(form.turn([VALUE], [RESULT]))
            if shown is None or (score := _score(shown, results, plain)) <= highest:
                continue
            best, text, highest = form, shown, score
        if highest == _score(VALUE + NAME + KEY + RESULT, results, 0):
            break
    return best, text


def _text_of_calls(render: Render, form: _CallForm, value: str) -> TextOfCalls:
    more = [_message("assistant", ANSWER2), _message("user", USER2)]
    together = form.turn([VALUE], [RESULT], ANSWER)
    again = [*together, *form.turn([VALUE2], [RESULT2], ANSWER2)[1:]]
    current, past, second = (render(turns) or "" for turns in (together, [*together, *more], again))
    # some write the text after the calls, or that of a turn's first calls alone
    if 0 <= current.find(ANSWER) < current.find(value) and ANSWER2 in second:
        return "beside" if ANSWER in past else "current"
    user, *turn = form.turn([VALUE], [RESULT])
    apart = render([user, _message("assistant", ANSWER), *turn, *more]) or ""
    return "before" if all(mark in apart for mark in (ANSWER, value, ANSWER2, USER2)) else "later"


def _score(text: str, results: bool, plain: int) -> int:
    shown = 8 * (VALUE in text) + 4 * (NAME in text) + 2 * (KEY in text) + 4 * (results and RESULT in text)
    leaks = (text.count("None") > plain) + (f"{{'{KEY}" in text)  # Python's forms of null and of an object
    return 2 * shown - leaks


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
