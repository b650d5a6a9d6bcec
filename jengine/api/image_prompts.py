"""Images in prompts and in conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jengine.base.errors import InvalidArgument
from jengine.core.image_options import PROCESSING
from jengine.core.images import CutImage, PromptImages
from jengine.text.template_traits import Conversation
from jengine.text.tokenizer import Tokenizer
from jengine.vision.reader import ImageReader

if TYPE_CHECKING:
    from jengine.text.chat_template import ChatTemplate

IMAGE = {"type": "image"}  # a part of a message, without the image
FIELD = "multi_modal_data"  # of a prompt, as in vLLM
PARTS = ("image_url", "image", "image_pil")  # types of a message's parts, and the fields that have the image


class GivenImage(NamedTuple):
    """An image in a conversation.

    Attributes:
        message, part: the indexes of its message, and of its part of that.
        source: see `read_image`.
        field: of the request, named in errors.
        path: whether a text may be a path.
    """

    message: int
    part: int
    source: Any
    field: str
    path: bool


def with_data(
    tokenizer: Tokenizer, ids: list[int], data: Any, processing: Mapping[str, Any] | None = None
) -> tuple[list[int], PromptImages | None]:
    """A prompt's tokens with the images of its multi_modal_data: one or a list, or those of `chat_prompt`,
    which have their places already.

    Args:
        processing: the prompt's mm_processor_kwargs.

    Raises:
        InvalidArgument: naming the image's field.
    """
    if data is None:
        check_processing(tokenizer, processing)
        return ids, None
    if not isinstance(data, dict):
        raise InvalidArgument(FIELD, type(data).__name__, 'must be a dict such as {"image": image}')
    for name, value in data.items():
        if name != "image" and value not in (None, [], ()):
            raise InvalidArgument(f"{FIELD}.{name}", type(value).__name__, "only images are supported")
    content, field = data.get("image"), f"{FIELD}.image"
    if isinstance(content, PromptImages):
        return ids, content
    images = list(content) if isinstance(content, list | tuple) else [] if content is None else [content]
    if not images:
        return ids, None
    reader = image_reader(tokenizer, field).adjusted(processing)
    reader.check_count(len(images), field)
    several = isinstance(content, list | tuple)
    read = [reader.read(source, f"{field}[{i}]" if several else field) for i, source in enumerate(images)]
    return reader.placed(ids, read, field)


def image_reader(tokenizer: Tokenizer, field: str) -> ImageReader:
    """The reader of images. Raises InvalidArgument if the engine reads none."""
    if tokenizer.images is None:
        raise InvalidArgument(field, "an image", "this model, or this engine, reads no images")
    return tokenizer.images


def check_processing(tokenizer: Tokenizer, processing: Mapping[str, Any] | None) -> None:
    """Raises InvalidArgument if a prompt without images may not have these mm_processor_kwargs."""
    if processing:
        image_reader(tokenizer, PROCESSING).adjusted(processing)


def given_images(messages: Any) -> list[GivenImage]:
    """The images of a conversation, in order.

    Raises:
        InvalidArgument: a field of an image's part is missing or unknown.
    """
    images: list[GivenImage] = []
    for at, message in enumerate(messages if isinstance(messages, list | tuple) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in PARTS:
                where = f"messages[{at}].content[{index}]"
                source, path = _source(part, where)
                images.append(GivenImage(at, index, source, f"{where}.{kind}", path))
    return images


def with_parts(messages: Any, images: list[GivenImage], parts: list[dict[str, Any]]) -> Any:
    """A copy of a conversation with these parts in the places of its images."""
    if not images:
        return messages
    copied = list(messages)
    for image, part in zip(images, parts, strict=True):
        message = copied[image.message]
        if message is messages[image.message]:
            message = copied[image.message] = {**message, "content": [*message["content"]]}
        message["content"][image.part] = part
    return copied


def images_apart(
    tokenizer: Tokenizer, messages: Any, processing: Mapping[str, Any] | None = None
) -> tuple[Any, list[CutImage]]:
    """A conversation with IMAGE in the place of each image, and the images in order.

    Args:
        processing: the conversation's mm_processor_kwargs.

    Raises:
        InvalidArgument: an image cannot be read, see `read_image`, there are too many, or the engine reads
            none.
    """
    images = given_images(messages)
    if not images:
        check_processing(tokenizer, processing)
        return messages, []
    reader = image_reader(tokenizer, images[0].field).adjusted(processing)
    reader.check_count(len(images), "messages")
    read = [reader.read(image.source, image.field, paths=image.path) for image in images]
    return with_parts(messages, images, [IMAGE] * len(images)), read


def image_marker(tokenizer: Tokenizer) -> str | None:
    """The text that stands for an image in templates that know none; None if the engine reads no images."""
    return None if tokenizer.images is None else tokenizer.images.vision.marker


def in_form(template: ChatTemplate, messages: Conversation, marker: str | None) -> Conversation:
    """Checked messages as the template takes them: parts or text, with markers for images."""
    return [
        {**message, "content": _content(template, message["content"], marker)}
        if "content" in message
        else message
        for message in messages
    ]


def _content(template: ChatTemplate, content: Any, marker: str | None) -> Any:
    if not isinstance(content, list) or template.takes_parts:
        return content
    return "\n".join(marker or "" if part == IMAGE else part["text"] for part in content)


def _source(part: dict[str, Any], where: str) -> tuple[Any, bool]:
    """The image of such a part, and whether it may be a path.

    Raises:
        InvalidArgument: a field is missing or unknown.
    """
    kind = part["type"]
    present = {key for key, value in part.items() if value is not None}
    if unknown := present - {"type", kind, "uuid"}:
        raise InvalidArgument(f"{where}.{min(unknown)}", "given", f"must be absent beside type {kind}")
    source = part.get(kind)
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
        raise InvalidArgument(f"{where}.{kind}", None, "must be an image")
    return source, True
