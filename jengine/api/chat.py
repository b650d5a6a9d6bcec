"""Checks conversations, and converts them to prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

from jengine.api.image_prompts import IMAGE, image_marker, image_reader, images_apart, in_form
from jengine.api.prompts import TokensPrompt, check_length
from jengine.base.errors import InvalidArgument, ModelError
from jengine.core.images import CutImage
from jengine.core.request import check_cache_salt
from jengine.text.template_adapter import joined
from jengine.text.template_traits import THOUGHTS
from jengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jengine.text.chat_template import ChatTemplate

ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields that are only for messages of one role.
ROLES_OF = {**dict.fromkeys(("tool_calls", "refusal", *THOUGHTS), "assistant"), "tool_call_id": "tool"}
SHOWN = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", THOUGHTS[0]))
# Fields of answers that clients send back, which say nothing to a model.
METADATA = frozenset((
    "annotations", "cache_control", "id", "index", "parsed", "phase", "provider_specific_fields",
    "reasoning_details", "status", "thinking_blocks", "type",
))  # fmt: skip

# {"role": one of ROLES, "content": text, or a list of texts and parts: {"type": "text", "text": text};
# {"type": "image", "image": a Pillow image, bytes, a path or a data URL};
# {"type": "image_url", "image_url": {"url": a data URL}}. An image may also be a CutImage.
Message = dict[str, Any]
Conversation = list[Message]


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt.

    Attributes:
        add_generation_prompt: end the prompt with the beginning of an answer. True unless
            continue_final_message is set.
        continue_final_message: continue the last message instead of answering it.
        tools: descriptions of tools, as JSON schemas. If the template does not show tools, they become a part
            of the system message.
        chat_template: a Jinja template to use instead of the model's.
        chat_template_kwargs: further variables for the template, such as {"enable_thinking": False}.
            Variables that the template does not use are ignored.
        cache_salt: see TextPrompt.
        mm_processor_kwargs: how images are resized, see EngineConfig.
    """

    add_generation_prompt: bool | None
    continue_final_message: bool
    tools: list[dict[str, Any]] | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    cache_salt: str | None
    mm_processor_kwargs: dict[str, Any] | None


def split_options(options: Mapping[str, Any], first: type) -> tuple[Any, Any]:
    """The options that are keys of a TypedDict, and the others."""
    names = first.__annotations__.keys()
    return {name: options[name] for name in options.keys() & names}, {
        name: options[name] for name in options.keys() - names
    }


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Conversation,
    *,
    max_model_len: int | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    cache_salt: str | None = None,
    mm_processor_kwargs: dict[str, Any] | None = None,
) -> TokensPrompt:
    """Make the prompt for one conversation. The options are those of ChatOptions.

    Raises:
        InvalidArgument: a message or option is wrong, or the template refuses the conversation.
        ModelError: the model has no chat template, or one that cannot be read.
    """
    check_cache_salt(cache_salt)
    messages, images = images_apart(tokenizer, messages, mm_processor_kwargs)
    text, ids = rendered_chat(
        tokenizer,
        messages,
        marker=image_marker(tokenizer),
        max_model_len=max_model_len,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
    )
    prompt = chat_tokens(tokenizer, text, ids, images)
    return prompt if cache_salt is None else {**prompt, "cache_salt": cache_salt}


def chat_tokens(tokenizer: Tokenizer, text: str, ids: list[int], images: list[CutImage]) -> TokensPrompt:
    """The prompt of a rendered conversation with these images.

    Raises:
        InvalidArgument: the template has lost some.
    """
    if not images:
        return {"prompt_token_ids": ids, "prompt": text}
    ids, placed = image_reader(tokenizer, "messages").placed(ids, images, "messages")
    return {"prompt_token_ids": ids, "prompt": text, "multi_modal_data": {"image": placed}}


def rendered_chat(
    tokenizer: Tokenizer,
    messages: Conversation,
    *,
    marker: str | None = None,
    max_model_len: int | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    tool_choice: str | None = None,
    tools_as_text: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> tuple[str, list[int]]:
    """A conversation's text and tokens. Runs the chat template.

    Args:
        messages: with IMAGE in the place of each image.
        marker: stands for an image in a template that knows none.
        tool_choice: "required" or a tool's name, if a grammar forces a call.
        tools_as_text: whether tools become text also if the template shows them.

    Raises:
        InvalidArgument: a message or option is wrong, or the template refuses the conversation.
        ModelError: the model has no chat template, or one that cannot be read.
    """
    messages = checked(messages)
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    if add_generation_prompt and continue_final_message:
        raise InvalidArgument("add_generation_prompt", True, "excludes continue_final_message")
    template = own_template(tokenizer, tools is not None, chat_template)
    _check_shown(messages, template)
    text = template.render(
        in_form(template, messages, marker),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=plain_json("tools", tools),
        tool_choice=tool_choice,
        tools_as_text=tools_as_text,
        variables=plain_json("chat_template_kwargs", chat_template_kwargs),
    )
    check_length(tokenizer, text, max_model_len)
    # Templates write the special tokens themselves.
    return text, tokenizer.encode(text, add_special_tokens=False)


def own_template(tokenizer: Tokenizer, with_tools: bool, template: str | None = None) -> ChatTemplate:
    """The template for a conversation: a Jinja template, one of the model's by name, or by default the one
    for this purpose.

    Raises:
        ModelError: the model has none, or it cannot be read.
    """
    from jengine.text.chat_template import ChatTemplate  # imported here, since only chats need jinja2

    if template is not None and template not in tokenizer.chat_templates:
        return ChatTemplate(template, tokenizer.special_tokens)
    templates = tokenizer.chat_templates
    usual = "tool_use" if with_tools and "tool_use" in templates else "default"
    name = usual if template is None else template
    if name not in templates:
        raise ModelError(
            "the model has no chat template; generate continues plain text, or pass chat_template",
            file=tokenizer.folder,
        )
    return templates[name]


def conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or many, as a list."""
    if (
        isinstance(messages, list | tuple)
        and messages
        and all(isinstance(conversation, list | tuple) for conversation in messages)
    ):
        return [cast(Conversation, conversation) for conversation in messages]
    return [cast(Conversation, messages)]


def checked(messages: object) -> Conversation:
    """A copy as plain JSON, without None values, except for a missing content. The parts of a message are
    joined by newlines.

    Raises:
        InvalidArgument: naming the message's field.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidArgument("messages", messages, "must be a list of at least one message")
    return [_checked(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _checked(where: str, message: object) -> Message:
    if not isinstance(message, dict) or not all(isinstance(name, str) for name in message):
        raise InvalidArgument(where, message, 'must be a dict such as {"role": "user", "content": "Hello"}')
    plain: Message = plain_json(where, {name: value for name, value in message.items() if value is not None})
    if plain.get("role") not in ROLES:
        raise InvalidArgument(f"{where}.role", plain.get("role"), f"must be one of {', '.join(ROLES)}")
    if "content" in plain:
        plain["content"] = _text(f"{where}.content", plain["content"])
    elif plain["role"] == "assistant":  # an answer that has only calls, or was cut off before its text
        plain["content"] = None
    else:
        raise InvalidArgument(f"{where}.content", None, "is missing; only an assistant's message may omit it")
    for name, role in ROLES_OF.items():
        if plain.get(name) and plain["role"] != role:
            raise InvalidArgument(f"{where}.{name}", plain[name], f"is only for messages of the role {role}")
    for name in ("name", "refusal", *THOUGHTS):
        if not isinstance(plain.get(name, ""), str):
            raise InvalidArgument(f"{where}.{name}", plain[name], "must be text")
    if refusal := plain.pop("refusal", ""):
        plain["content"] = joined(plain["content"], refusal)
    _read_reasoning(where, plain)
    if not plain.get("tool_calls", True):
        del plain["tool_calls"]
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(f"{where}.tool_calls", plain["tool_calls"])
    return plain


def _read_reasoning(where: str, message: Message) -> None:
    """Servers and clients have several names for the same field."""
    texts = {name: text for name in THOUGHTS if (text := message.pop(name, ""))}
    if len(set(texts.values())) > 1:
        raise InvalidArgument(where, [*texts], "only one of these may be in a message")
    for text in texts.values():
        message[THOUGHTS[0]] = text


def _tool_calls(where: str, calls: object) -> list[Message]:
    """Without None values, which clients send for fields that are missing. Arguments may have any form."""
    if not isinstance(calls, list):
        raise InvalidArgument(where, calls, "must be a list of calls")
    checked_calls = []
    for i, call in enumerate(calls):
        if not isinstance(call, dict):
            raise InvalidArgument(f"{where}[{i}]", call, "must be an object")
        call = {name: value for name, value in call.items() if value is not None}
        if call.get("type", "function") != "function":
            raise InvalidArgument(f"{where}[{i}].type", call["type"], "must be function")
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            limit = 'must be an object such as {"name": "f", "arguments": "{}"}'
            raise InvalidArgument(f"{where}[{i}].function", function, limit)
        function = {name: value for name, value in function.items() if value is not None}
        checked_calls.append({**call, "type": "function", "function": function})
    return checked_calls


def _check_shown(messages: Conversation, template: ChatTemplate) -> None:
    """Raises InvalidArgument for a field that no template of models has, and this one does not mention."""
    for i, message in enumerate(messages):
        for name in message.keys() - SHOWN - METADATA:
            if message[name] and name not in template.source:
                limit = "the model's chat template does not show it"
                raise InvalidArgument(f"messages[{i}].{name}", message[name], limit)


def _text(where: str, content: object) -> str | list[dict[str, Any]]:
    """Text, joined if it is in parts; or the parts, if some are images."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(where, content, 'must be text, or a list of {"type": "text", "text": ...}')
    content = [_as_text_part(part) for part in content]
    for i, part in enumerate(content):
        if part == IMAGE:
            continue
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            limit = 'must be {"type": "text", "text": ...} or an image; only text and images are supported'
            raise InvalidArgument(f"{where}[{i}]", part, limit)
    if IMAGE in content:
        return [part if part == IMAGE else {"type": "text", "text": part["text"]} for part in content]
    return "\n".join(part["text"] for part in content)


def _as_text_part(part: Any) -> Any:
    """Plain text and a refusal as a part of the type text; others as they are."""
    refused = isinstance(part, dict) and part.get("type") == "refusal"
    text = part.get("refusal") if refused else part
    return {"type": "text", "text": text} if refused or isinstance(part, str) else part


def plain_json(where: str, value: Any) -> Any:
    """A copy of JSON types only: an untrusted template cannot call methods of a caller's object."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as wrong:
        raise InvalidArgument(where, value, f"must be plain JSON: {wrong}") from None
