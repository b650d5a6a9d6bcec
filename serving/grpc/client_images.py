"""Images as clients give them, as protobuf messages."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jengine import InvalidArgument
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb

SCHEMES = ("data", "http", "https", "file")
PARTS = ("image_url", "image", "image_pil")  # types of a message's parts, and the fields that have the image


def part_of(where: str, part: Mapping[str, Any]) -> pb.ContentPart:
    """A part of a message: {"type": "text", "text": text}, or an image as in LLM.chat.

    Raises:
        InvalidArgument: it is neither, or its file cannot be read.
    """
    kind = part.get("type")
    if kind == "text":
        return pb.ContentPart(text=part["text"])
    if kind not in PARTS:
        raise InvalidArgument(f"{where}.type", kind, f"must be one of text, {', '.join(PARTS)}")
    source = part.get(kind)
    if kind == "image_url" and isinstance(source, Mapping):
        source = source.get("url")
    return pb.ContentPart(image=image_of(f"{where}.{kind}", source))


def image_of(where: str, source: Any) -> pb.Image:
    """An image: bytes, a path, a URL or a Pillow image. Raises InvalidArgument as `part_of`."""
    if isinstance(source, str):
        if source.partition(":")[0].lower() in SCHEMES:
            return pb.Image(url=source)
        source = Path(source)
    if isinstance(source, Path):
        try:
            source = source.read_bytes()
        except OSError as wrong:
            raise InvalidArgument(where, str(source), f"cannot be read: {wrong.strerror}") from None
    elif hasattr(source, "save"):  # Pillow's; not imported here
        file = io.BytesIO()
        source.save(file, "PNG")
        source = file.getvalue()
    if not isinstance(source, bytes | bytearray | memoryview):
        limit = "must be a Pillow image, bytes, a path or a URL"
        raise InvalidArgument(where, type(source).__name__, limit)
    return pb.Image(data=bytes(source))
