"""Images of requests, from where clients have them to what the engine takes. Nothing is decoded in this
process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jengine import InvalidArgument, Tokenizer
from jengine.serving.calls.call import NamedImage
from jengine.serving.guards.media import Media
from jengine.serving.guards.sandbox import Sandbox
from jengine.spi import CutImage, ImageReader, given_images, image_reader, with_parts


class RequestImages:
    """
    Args:
        media: where images with an address are; closed with this.
    """

    def __init__(self, sandbox: Sandbox, media: Media) -> None:
        self._sandbox, self._media = sandbox, media

    def close(self) -> None:
        self._media.close()

    async def in_messages(
        self, client: str, messages: Any, tokenizer: Tokenizer, processing: Mapping[str, Any] | None
    ) -> Any:
        """A copy of a conversation in which each image is a CutImage.

        Raises:
            InvalidArgument: an image may not be opened or cannot be read, there are too many, or the model
                reads none.
            Refusal: too many images are waiting.
        """
        images = given_images(messages)
        if not images:
            return messages
        sources = [
            image.source if isinstance(image.source, NamedImage) else NamedImage(image.source, image.field)
            for image in images
        ]
        read = await self.read(client, sources, tokenizer, "messages", processing)
        return with_parts(messages, images, [{"type": "image", "image": image} for image in read])

    async def read(
        self,
        client: str,
        sources: list[NamedImage],
        tokenizer: Tokenizer,
        field: str,
        processing: Mapping[str, Any] | None,
    ) -> list[CutImage]:
        """The images of a prompt, one after the other. Raises as `in_messages`.

        Args:
            field: of them together.
        """
        reader = image_reader(tokenizer, sources[0].field)
        reader.check_count(len(sources), field)
        reader.adjusted(processing)  # raises, if they are wrong
        return [await self._one(client, *source, reader, processing) for source in sources]

    async def _one(
        self,
        client: str,
        source: Any,
        field: str,
        reader: ImageReader,
        processing: Mapping[str, Any] | None,
    ) -> CutImage:
        if isinstance(source, str):
            scheme = source[:10].partition(":")[0].lower()
            if scheme in ("http", "https", "file"):
                source = await self._media.read(client, source, field)
            elif scheme != "data":
                limit = "must be a data URL, such as data:image/png;base64,... or an http or https URL"
                raise InvalidArgument(field, source[:200], limit)
        elif not isinstance(source, bytes):
            raise InvalidArgument(field, type(source).__name__, "must be a URL")
        return await self._sandbox.read_image(client, source, field, reader, processing)
