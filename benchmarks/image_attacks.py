"""Requests with images that are meant to do harm, for benchmarks.attacks and the service's tests."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from functools import cache

from PIL import Image

from jengine.serving.generated.jengine.v1 import generate_pb2 as pb

SIDE = 8000  # pixels; 64 million are allowed


def asked(*images: pb.Image) -> pb.ChatRequest:
    parts = [pb.ContentPart(image=image) for image in images]
    message = pb.ChatMessage(role="user", parts=[*parts, pb.ContentPart(text="What?")])
    return pb.ChatRequest(messages=[message], sampling_params=pb.SamplingParams(max_tokens=4))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says that it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


@cache
def _file(form: str, frames: int, mode: str, side: int) -> bytes:
    buffer, more = io.BytesIO(), {}
    images = [Image.new(mode, (side, side), number) for number in range(frames)]
    if frames > 1:
        more = {"save_all": True, "append_images": images[1:]}
    images[0].save(buffer, form, **more)
    return buffer.getvalue()


def image_bomb(i: int) -> pb.ChatRequest:
    """A small file that says that it has 2.5 billion pixels."""
    return asked(pb.Image(data=bomb(50_000, 50_000 + i)))


def image_without_pixels(i: int) -> pb.ChatRequest:
    """A small file that says that it has 64 million pixels, and has none of them."""
    return asked(pb.Image(data=bomb(SIDE, SIDE - i)))


def image_of_most_pixels(i: int) -> pb.ChatRequest:
    """64 million transparent pixels, which takes seconds to decode. It is not refused."""
    return asked(pb.Image(data=_file("PNG", 1, "RGBA", SIDE)))


def image_truncated(i: int) -> pb.ChatRequest:
    return asked(pb.Image(data=_file("JPEG", 1, "RGB", 4000)[:-500]))


def image_animated(i: int) -> pb.ChatRequest:
    return asked(pb.Image(data=_file("GIF", 60, "L", 500)))


def image_of_a_wrong_type(i: int) -> pb.ChatRequest:
    return asked(pb.Image(url="data:text/html;base64,PGh0bWw+"), pb.Image(data=b"<svg/>"))


def image_in_the_local_network(i: int) -> pb.ChatRequest:
    """An image of a host that only a pattern allows, and of one that nothing allows."""
    addresses = "http://localhost:22/", "http://169.254.169.254/latest/meta-data"
    return asked(pb.Image(url=addresses[i % len(addresses)]))


def image_of_a_file(i: int) -> pb.ChatRequest:
    return asked(pb.Image(url="file:///etc/passwd"))


def thousands_of_images(i: int) -> pb.ChatRequest:
    return asked(*[pb.Image(data=bomb(9, 9))] * 4000)


IMAGES: dict[str, Callable[[int], pb.ChatRequest]] = {
    one.__name__: one
    for one in (
        image_bomb,
        image_without_pixels,
        image_of_most_pixels,
        image_truncated,
        image_animated,
        image_of_a_wrong_type,
        image_in_the_local_network,
        image_of_a_file,
        thousands_of_images,
    )
}
