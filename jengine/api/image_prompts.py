"""Images in prompts and in conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jengine.base.errors import InvalidArgument
from jengine.core.images import PromptImages
from jengine.text.tokenizer import Tokenizer
from jengine.vision.reader import ImageReader

if TYPE_CHECKING:
    from PIL.Image import Image

    from jengine.text.chat_template import ChatTemplate

IMAGE = {"type": "image"}  # a part of a message, without the image
FIELD = "multi_modal_data"  # of a prompt, as in vLLM
# types of a message's parts that are images: the field that has it
PARTS = {"image_url": "image_url", "image": "image", "image_pil": "image_pil"}


def with_data(tokenizer: Tokenizer, ids: list[int], data: Any) -> tuple[list[int], PromptImages | None]:
    """A prompt's tokens with the images of its multi_modal_data: one or a list, or those of `chat_prompt`,
    which have their places already.

    Raises:
        InvalidArgument: naming the image's field.
    """
    if data is None:
        return ids, None
    if not isinstance(data, dict):
        raise InvalidArgument(FIELD, type(data).__name__, 'must be a dict such as {"image": image}')
    for name, value in data.items():
        if name != "image" and value not in (None, [], ()):
            raise InvalidArgument(f"{FIELD}.{name}", type(value).__name__, "only images are supported")
    given, field = data.get("image"), f"{FIELD}.image"
    if isinstance(given, PromptImages):
        return ids, given
    images = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    if not images:
        return ids, None
    reader = reader_of(tokenizer, field)
    several = isinstance(given, list | tuple)
    read = [reader.read(one, f"{field}[{i}]" if several else field) for i, one in enumerate(images)]
    return reader.placed(ids, read, field)


def reader_of(tokenizer: Tokenizer, field: str) -> ImageReader:
    """Raises InvalidArgument if there is none."""
    if tokenizer.images is None:
        raise InvalidArgument(field, "an image", "this model, or this engine, reads no images")
    return tokenizer.images


def images_apart(tokenizer: Tokenizer, messages: Any, *, paths: bool) -> tuple[Any, list[Image]]:
    """A conversation with IMAGE in the place of each image, and the images in order.

    Raises:
        InvalidArgument: an image cannot be read, see `read_image`, or the engine reads none.
    """
    images: list[Image] = []
    left: list[Any] = []
    if not isinstance(messages, list | tuple):
        return messages, images
    for at, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list) or not any(map(_is_image, content)):
            left.append(message)
            continue
        parts = []
        for index, part in enumerate(content):
            if _is_image(part):
                where = f"messages[{at}].content[{index}]"
                source, path = source_of(part, where, paths=paths)
                field = f"{where}.{PARTS[part['type']]}"
                images.append(reader_of(tokenizer, field).read(source, field, paths=path))
                part = IMAGE
            parts.append(part)
        left.append({**message, "content": parts})
    return left, images


def in_form(
    template: ChatTemplate, messages: list[dict[str, Any]], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Checked messages as the template shows them: parts where it takes them, otherwise text, with the text
    that stands for an image.
    """
    return [
        {**message, "content": _content(template, message["content"], tokenizer)}
        if "content" in message
        else message
        for message in messages
    ]


def _content(template: ChatTemplate, content: Any, tokenizer: Tokenizer) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if template.only_parts else content
    if template.takes_parts:
        return content
    marker = reader_of(tokenizer, "messages").vision.marker
    return "\n".join(marker if part == IMAGE else part["text"] for part in content)


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in PARTS


def source_of(part: dict[str, Any], where: str, *, paths: bool) -> tuple[Any, bool]:
    """The image of such a part, and whether it may be a path.

    Raises:
        InvalidArgument: a field is missing or unknown.
    """
    kind = part["type"]
    name = PARTS[kind]
    if unknown := part.keys() - {"type", name, "uuid"}:
        raise InvalidArgument(f"{where}.{min(unknown)}", "given", f"must be absent beside type {kind}")
    source = part.get(name)
    if kind == "image_url":
        if isinstance(source, dict):
            if (detail := source.get("detail", "auto")) not in ("auto", "low", "high", "original", None):
                raise InvalidArgument(f"{where}.image_url.detail", detail, "must be auto, low or high")
            if source.keys() - {"url", "detail"}:
                raise InvalidArgument(f"{where}.image_url", [*source], "must have url and detail only")
            source = source.get("url")
        if not isinstance(source, str):
            raise InvalidArgument(f"{where}.image_url.url", source, "must be a data URL")
        return source, False
    if source is None:
        raise InvalidArgument(f"{where}.{name}", None, "must be an image")
    return source, paths
