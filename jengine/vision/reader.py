"""Reads and checks the images that users give with a prompt, and puts them into it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine.base.display import counted
from jengine.base.errors import InvalidArgument
from jengine.core.image_options import PROCESSING, processing_options, replaced
from jengine.core.images import CutImage, ImagePart, PromptImages, key_of
from jengine.vision.family import VISUAL, Encode, Patches, Vision
from jengine.vision.folder import no_text, served_vision

if TYPE_CHECKING:
    from PIL.Image import Image


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_IMAGE_BYTES = 32 << 20  # of an encoded image
MOST_PIXELS = 64 << 20  # of a decoded one
MOST_RATIO = 200  # of the longer side to the shorter one
DATA = "data:"


def read_image(source: Any, field: str, *, paths: bool = True) -> Image:
    """An image in RGB, turned as its metadata say.

    Args:
        source: a Pillow image, the bytes of a file, a path, or a data URL.
        field: named in errors.
        paths: whether a text may be a path.

    Raises:
        InvalidArgument: it is none of these, too large, truncated, animated, or of another format.
    """
    pillow = _pillow()
    if isinstance(source, pillow.Image.Image):
        return _rgb(source, field)
    if isinstance(source, str):
        if source[: len(DATA)].lower() == DATA:
            source = _of_data_url(source, field)
        elif source.partition(":")[0].lower() in ("http", "https"):
            raise InvalidArgument(field, source[:200], "must be a data URL: addresses are not fetched")
        elif paths:
            source = Path(source)
        else:
            raise InvalidArgument(
                field, source[:200], "must be a data URL, such as data:image/png;base64,..."
            )
    if isinstance(source, Path):
        source = _of_file(source, field)
    if not isinstance(source, bytes | bytearray | memoryview):
        limit = "must be a Pillow image, bytes, a path or a data URL"
        raise InvalidArgument(field, type(source).__name__, limit)
    return _decoded(bytes(source), field)


def cut_image(vision: Vision, image: Image, field: str, processing: str = "") -> CutImage:
    """An image in RGB as the parts that the encoder reads.

    Args:
        processing: what the parts depend on beside the image and the model.

    Raises:
        InvalidArgument: the model cannot read an image of this size.
    """
    try:
        cut = vision.cut(image)
    except InvalidArgument as wrong:
        raise InvalidArgument(field, wrong.value, wrong.limit) from None
    keys = _keys(image, len(cut), processing)
    parts = zip(keys, cut, strict=True)
    return CutImage(tuple(ImagePart(key, p.pixels, p.places, p.rows, p.grid) for key, p in parts))


def with_images(
    vision: Vision, ids: list[int], images: Sequence[Image | CutImage], field: str
) -> tuple[list[int], PromptImages | None]:
    """A prompt whose image tokens are replaced by the images, in order.

    Raises:
        InvalidArgument: there are more or fewer images than such tokens.
    """
    places = ids.count(vision.token)
    if places != len(images):
        limit = f"the prompt has {counted(places, 'place')} for images: {vision.marker} stands for each"
        raise InvalidArgument(field, counted(len(images), "image"), limit)
    if not images:
        return ids, None
    prompt, positions, parts, left = list[int](), list[int](), list[ImagePart](), iter(images)
    for token in ids:
        if token != vision.token:
            prompt.append(token)
            continue
        image = next(left)
        cut = (image if isinstance(image, CutImage) else cut_image(vision, image, field)).parts
        inside = vision.prompt([Patches(item.pixels, item.places, item.rows, item.grid) for item in cut])
        positions += [len(prompt) + at for at, item in enumerate(inside) if item == VISUAL]
        prompt += [vision.row_token if item == VISUAL else item for item in inside]
        parts += cut
    return prompt, PromptImages(tuple(parts), positions)


def _keys(image: Image, count: int, processing: str) -> list[int]:
    """Keys of an image's parts."""
    whole = hashlib.sha256(f"{image.width} {image.height} {processing}".encode())
    whole.update(image.tobytes())
    content = whole.digest()
    return [key_of(content + index.to_bytes(4, "little")) for index in range(count)]


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise InvalidArgument.needs_extra("image", "an image", "images", error) from None
    return PIL


def _of_data_url(url: str, field: str) -> bytes:
    kind, comma, data = url.partition(",")
    if not comma or not kind.lower().endswith(";base64"):
        raise InvalidArgument(field, kind[:100], "must be a data URL in base64: data:image/png;base64,...")
    media = kind[len(DATA) :].split(";")[0].lower()
    if not media.startswith("image/"):
        raise InvalidArgument(field, media[:100], "must be a data URL of an image, such as data:image/png")
    _check_bytes(len(data) * 3 // 4, field)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(field, f"{data[:20]}...", "must be base64") from None


def _of_file(path: Path, field: str) -> bytes:
    try:
        _check_bytes(path.stat().st_size, field)
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(field, str(path)[:200], f"cannot be read: {error.strerror}") from None


def _check_bytes(count: int, field: str) -> None:
    if count > MOST_IMAGE_BYTES:
        raise InvalidArgument(field, f"{count} bytes", f"at most {MOST_IMAGE_BYTES} bytes")


def _decoded(data: bytes, field: str) -> Image:
    pillow = _pillow()
    _check_bytes(len(data), field)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes, which are checked here
        try:
            image: Image = pillow.Image.open(io.BytesIO(data), formats=FORMATS)
        except pillow.UnidentifiedImageError:
            limit = f"must be a whole file in one of the formats {', '.join(FORMATS)}"
            raise InvalidArgument(field, f"{len(data)} bytes", limit) from None
        except pillow.Image.DecompressionBombError:
            raise InvalidArgument(field, "too many pixels", f"at most {MOST_PIXELS} pixels") from None
        except MemoryError:
            raise
        except Exception as error:
            raise InvalidArgument(field, f"{len(data)} bytes", f"cannot be decoded: {error}") from None
        return _rgb(image, field)


def _rgb(image: Image, field: str) -> Image:
    from jengine.vision.pixels import rgb  # needs numpy, for which --help does not wait

    pillow, (width, height) = _pillow(), image.size
    if width * height > MOST_PIXELS:
        raise InvalidArgument(field, f"{width} x {height} pixels", f"at most {MOST_PIXELS} pixels")
    if max(width, height) > MOST_RATIO * min(width, height):
        limit = f"one side at most {MOST_RATIO} times the other"
        raise InvalidArgument(field, f"{width} x {height} pixels", limit)
    # a camera's MPO is a JPEG with previews or gain maps behind it
    if image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
        raise InvalidArgument(field, counted(frames, "frame"), "must be 1: animated images are not supported")
    try:
        image.load()
        turned: Image = pillow.ImageOps.exif_transpose(image)
        return turned if turned.mode == "RGB" else rgb(turned)
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidArgument(field, f"{width} x {height} pixels", f"cannot be decoded: {error}") from None


@dataclass(frozen=True, slots=True)
class ImageReader:
    """
    Attributes:
        folder: that of the model's files.
        most: images of a prompt.
        rows: the most embeddings of an image, if the family reads images of any size.
        processing: the engine's mm_processor_kwargs.
        asked: those of a request, beside them.
    """

    vision: Vision
    folder: Path
    most: int
    rows: int
    processing: Mapping[str, Any]
    encode: Encode = field(repr=False)
    asked: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        folder: Path,
        encode: Encode,
        max_images: int,
        rows: int,
        processing: Mapping[str, Any] | None = None,
    ) -> ImageReader | None:
        """Make the reader of a model's folder; None: the model reads no images. See `served_vision`."""
        processing = processing_options(processing)
        vision = served_vision(folder, encode, rows, processing) if max_images else None
        return None if vision is None else cls(vision, folder, max_images, rows, processing, encode)

    @classmethod
    def without_text(cls, folder: Path, rows: int, processing: Mapping[str, Any]) -> ImageReader:
        """One that reads images, but places none in a prompt."""
        reader = cls.of(folder, no_text, 1, rows, processing)
        assert reader is not None
        return reader

    def adjusted(self, asked: Mapping[str, Any] | None) -> ImageReader:
        """One for a request's mm_processor_kwargs.

        Raises:
            InvalidArgument: the model has none of this name, or its images would have more embeddings than
                the engine's.
        """
        asked = processing_options(asked)
        if not asked:
            return self
        vision = served_vision(self.folder, self.encode, self.rows, replaced(self.processing, asked))
        assert vision is not None
        if vision.most_rows > self.vision.most_rows or vision.largest > self.vision.largest:
            limit = f"images of {vision.most_rows} embeddings; at most the engine's {self.vision.most_rows}"
            raise InvalidArgument(PROCESSING, dict(asked), limit)
        return replace(self, vision=vision, asked=asked)

    def read(self, source: Any, field: str, *, paths: bool = True) -> CutImage:
        """Reads an image, as `read_image`, unless it has been read."""
        if isinstance(source, CutImage):
            return source
        image: Image = read_image(source, field, paths=paths)
        options = replaced(self.processing, self.asked)
        return cut_image(self.vision, image, field, json.dumps(options, sort_keys=True) if options else "")

    def warm_up(self) -> None:
        """Imports all that reading needs, with a small image."""
        from PIL import Image

        self.read(Image.new("RGB", (64, 64)), "image")

    def check_count(self, count: int, field: str) -> None:
        """Raises InvalidArgument if a prompt may not have so many images."""
        if count > self.most:
            limit = f"at most {counted(self.most, 'image')} in a prompt, see limit_mm_per_prompt"
            raise InvalidArgument(field, counted(count, "image"), limit)

    def placed(
        self, ids: list[int], images: Sequence[CutImage], field: str
    ) -> tuple[list[int], PromptImages | None]:
        """A prompt with its images in the places of its image tokens.

        Raises:
            InvalidArgument: there are too many, or as `with_images`.
        """
        self.check_count(len(images), field)
        return with_images(self.vision, ids, images, field)
