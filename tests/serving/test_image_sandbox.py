"""Images are decoded in disposable processes: whatever a decoder does only affects its own request."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.image_attacks import bomb
from jengine import InvalidArgument
from jengine.serving.guards import worker
from jengine.serving.guards.sandbox import Sandbox
from jengine.spi import MOST_IMAGE_BYTES, CutImage, ImageReader
from tests.golden.images import picture, write_image_model
from tests.serving.sandboxes import within
from tests.vision.test_images import ANIMATED, encoded

FAULTY = "tests.serving.faulty_image_worker"
PNG = encoded(picture("decoded", (60, 20)))


@pytest.fixture
def reader(tmp_path: Path) -> ImageReader:
    write_image_model(tmp_path, "smolvlm")
    found = ImageReader.of(tmp_path, lambda text: [0], 4, 1024)
    assert found is not None
    return found


def same(one: CutImage, other: CutImage) -> bool:
    return len(one.parts) == len(other.parts) and all(
        (a.key, a.rows, tuple(a.grid)) == (b.key, b.rows, tuple(b.grid))
        and np.array_equal(a.pixels, b.pixels)
        and np.array_equal(a.places, b.places)
        for a, b in zip(one.parts, other.parts, strict=True)
    )


def test_images_are_read_as_in_the_library(reader: ImageReader, tmp_path: Path) -> None:
    """Also with a request's own size, which changes the parts and their keys; for each model by itself."""
    small = {"size": {"longest_edge": 48}}
    write_image_model(tmp_path / "other", "idefics3")
    other = ImageReader.of(tmp_path / "other", lambda text: [0], 4, 1024, {"do_image_splitting": False})
    assert other is not None

    async def work(sandbox: Sandbox) -> None:
        whole = await sandbox.read_image("a", PNG, "image", reader)
        assert same(whole, reader.read(PNG, "image"))
        url = "data:image/png;base64," + base64.b64encode(PNG).decode()
        assert same(whole, await sandbox.read_image("a", url, "image", reader))
        less = await sandbox.read_image("a", PNG, "image", reader, small)
        assert same(less, reader.adjusted(small).read(PNG, "image"))
        assert not {part.key for part in less.parts} & {part.key for part in whole.parts}
        assert same(await sandbox.read_image("a", PNG, "image", other), other.read(PNG, "image"))

    within(work, workers=1)


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        (bomb(50_000, 50_000), "at most 67108864 pixels"),
        (bomb(8_000, 8_000), "cannot be decoded"),
        (PNG[:-400], "cannot be decoded"),
        (ANIMATED, "animated images are not supported"),
        (b"<svg/>", "one of the formats"),
        (bytes(MOST_IMAGE_BYTES + 1), f"at most {MOST_IMAGE_BYTES} bytes"),
        ("data:image/png;base64," + "A" * (2 * MOST_IMAGE_BYTES), f"at most {MOST_IMAGE_BYTES} bytes"),
        ("/etc/passwd", "must be a data URL"),
        ("data:image/png;base64,\ud800", "must be base64"),
    ],
)
def test_refused(source: bytes | str, limit: str, reader: ImageReader) -> None:
    async def work(sandbox: Sandbox) -> None:
        with pytest.raises(InvalidArgument, match=limit) as refused:
            await sandbox.read_image("a", source, "messages[0]", reader)
        assert refused.value.field == "messages[0]"

    within(work)


def test_a_decoder_that_hangs_or_crashes_costs_one_request(
    reader: ImageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client's image is read meanwhile."""
    monkeypatch.setattr(worker, "IMAGE_SECONDS", 0.5)

    async def work(sandbox: Sandbox) -> None:
        await sandbox.read_image("b", PNG, "image", reader)
        hanging = asyncio.create_task(sandbox.read_image("a", b"hang", "image", reader))
        for limit, source in (("signal 11 ", b"crash"), ("MiB of memory", b"memory")):
            with pytest.raises(InvalidArgument, match=limit):
                await sandbox.read_image("b", source, "image", reader)
            await sandbox.read_image("b", PNG, "image", reader)
        with pytest.raises(InvalidArgument, match=r"^image='': takes more than 0.5 s of processor time"):
            await hanging

    within(work, image_module=FAULTY)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, jengine.serving.guards.worker; from jengine.spi import ImageReader;"
        " print({'jax', 'grpc', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
