"""Images that are refused, with the field, the value and the limit; and what others become."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.image_attacks import bomb
from jengine.base.errors import InvalidArgument
from jengine.vision.reader import MOST_IMAGE_BYTES, read_image


def encoded(image: Image.Image, form: str = "PNG", **how: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **how)
    return buffer.getvalue()


SMALL = Image.new("RGB", (8, 6), (1, 2, 3))
PNG = encoded(SMALL)
ANIMATED = encoded(SMALL, "GIF", save_all=True, append_images=[Image.new("RGB", (8, 6))])
URL = "data:image/png;base64,"


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        (5, "must be a Pillow image, bytes, a path or a data URL"),
        (b"", "one of the formats PNG, JPEG"),
        (b"<svg/>", "one of the formats PNG, JPEG"),
        (encoded(SMALL, "TIFF"), "one of the formats PNG, JPEG"),
        (encoded(Image.effect_noise((64, 64), 90))[:900], "cannot be decoded"),
        (bomb(50_000, 50_000), "at most 67108864 pixels"),
        (bomb(12_000, 9_000), "at most 67108864 pixels"),
        (bytes(MOST_IMAGE_BYTES + 1), f"at most {MOST_IMAGE_BYTES} bytes"),
        (Image.new("RGB", (1000, 2)), "one side at most 200 times the other"),
        (ANIMATED, "animated images are not supported"),
        ("no_such_file.png", "cannot be read"),
        ("https://example.com/a.png", "addresses are not fetched"),
        ("http://169.254.169.254/latest", "addresses are not fetched"),
        ("data:text/html;base64,AAAA", "must be a data URL of an image"),
        ("data:image/png,AAAA", "must be a data URL in base64"),
        (URL + "A*A=", "must be base64"),
        (URL + base64.b64encode(PNG[:40]).decode(), "must be a whole file"),
    ],
)
def test_refused(source: Any, limit: str) -> None:
    with pytest.raises(InvalidArgument, match="image=") as refused:
        read_image(source, "image")
    assert limit in str(refused.value)


def test_no_path_of_a_client() -> None:
    with pytest.raises(InvalidArgument, match="must be a data URL"):
        read_image("/etc/hostname", "image", paths=False)


def test_forms(tmp_path: Path) -> None:
    """All become the same RGB image, turned as a camera says."""
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    for source in (SMALL, PNG, bytearray(PNG), file, str(file), URL + base64.b64encode(PNG).decode()):
        image = read_image(source, "image")
        assert image.mode == "RGB" and np.array_equal(np.asarray(image), np.asarray(SMALL))
    second = Image.new("RGB", (4, 4))
    mpo = encoded(SMALL, "MPO", save_all=True, append_images=[second], quality=100)
    assert read_image(mpo, "image").size == (8, 6), "a camera's JPEG with a preview"
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    assert read_image(encoded(SMALL, "JPEG", exif=exif), "image").size == (6, 8)
    assert read_image(Image.new("RGBA", (3, 3)), "image").getpixel((0, 0)) == (255, 255, 255)


def test_modes() -> None:
    """Shades of 16 bits are not clipped; what is transparent lies upon white."""
    deep = Image.fromarray(np.array([[0, 32768, 65535]], np.uint16))
    palette = Image.new("P", (1, 1), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    turned = Image.Exif()
    turned[0x0112] = 3  # a half turn
    for data, expected in (
        (encoded(deep), [0, 128, 255]),
        (encoded(deep, transparency=0), [255, 128, 255]),
        (encoded(Image.new("LA", (1, 1), (9, 128))), [132]),
        (encoded(Image.new("L", (1, 1), 7), transparency=7), [255]),
        (encoded(Image.new("1", (1, 1), 1)), [255]),
        (encoded(palette), [(255, 0, 0)]),
        (encoded(palette, transparency=1), [255]),
        (encoded(palette, "GIF", transparency=1), [255]),
        (encoded(Image.new("RGBA", (1, 1), (1, 2, 3, 0))), [255]),
        (encoded(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "JPEG", quality=100), [(255, 0, 0)]),
        (encoded(Image.fromarray(np.array([[0, 255]], np.uint8)), "PNG", exif=turned), [255, 0]),
    ):
        image = read_image(data, "image")
        pixels = [one if isinstance(one, tuple) else (one,) * 3 for one in expected]
        found = [image.getpixel((x, 0)) for x in range(image.width)]
        assert found == pixels and image.mode == "RGB"
