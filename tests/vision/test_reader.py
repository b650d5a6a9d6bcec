"""mm_processor_kwargs: those of the engine and those of a request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jengine.base.errors import InvalidArgument, ModelError
from jengine.core.config import EngineConfig
from jengine.core.image_options import processing_options
from jengine.vision.reader import ImageReader
from tests.golden.images import picture, write_image_model
from tests.golden.pictures import PICTURES
from tests.golden.weights import write_model

VARIANT = "qwen2_5_vl"
UNIT = 64  # pixels of an embedding
LARGE = picture("large", (500, 300))


def reader(folder: Path, processing: dict[str, Any] | None = None, rows: int = 256) -> ImageReader:
    write_model(folder, VARIANT)
    (folder / "preprocessor_config.json").write_text(json.dumps(PICTURES[VARIANT].processor))
    found = ImageReader.of(folder, lambda text: [0], 4, rows, processing)
    assert found is not None
    return found


def test_images_of_any_size(tmp_path: Path) -> None:
    """Fewer pixels make fewer embeddings, under other keys; the older and the newer names mean the same."""
    engine = reader(tmp_path, {"max_pixels": UNIT * 50})
    less = engine.adjusted({"max_pixels": UNIT * 20})
    [whole], [small] = (one.read(LARGE, "image").parts for one in (engine, less))
    assert small.rows <= 20 < whole.rows <= 50
    assert small.key != whole.key == engine.adjusted(None).read(LARGE, "image").parts[0].key
    newer = engine.adjusted({"size": {"shortest_edge": UNIT, "longest_edge": UNIT * 20}})
    assert newer.read(LARGE, "image").parts[0].grid == small.grid
    assert less.read(LARGE, "image").parts[0].key == small.key
    with pytest.raises(InvalidArgument, match="embeddings; at most the engine's"):
        engine.adjusted({"max_pixels": UNIT * 200})
    with pytest.raises(InvalidArgument, match=r"mm_processor_kwargs.max_pixels=10: must be at least"):
        engine.adjusted({"max_pixels": 10})
    with pytest.raises(InvalidArgument, match=r"at most .*, see image_pool_rows"):
        reader(tmp_path, {"max_pixels": UNIT * 257})
    with pytest.raises(InvalidArgument, match="'do_image_splitting': must be one of max_pixels"):
        engine.adjusted({"do_image_splitting": False})


def test_tiles(tmp_path: Path) -> None:
    write_image_model(tmp_path, "smolvlm")
    engine = ImageReader.of(tmp_path, lambda text: [0], 4, 1024)
    assert engine is not None
    parts = [
        len(engine.adjusted(how).read(LARGE, "image").parts)
        for how in (None, {"size": {"longest_edge": 48}}, {"do_image_splitting": False})
    ]
    assert parts[0] > parts[1] > parts[2] == 1
    with pytest.raises(InvalidArgument, match=r"mm_processor_kwargs.size.longest_edge=5000: at most 4096"):
        engine.adjusted({"size": {"longest_edge": 5000}})
    with pytest.raises(InvalidArgument, match=r"'shortest_edge': only size.longest_edge"):
        engine.adjusted({"size": {"shortest_edge": 48}})


@pytest.mark.parametrize(
    "wrong, limit",
    [
        ({"fps": 1}, r"mm_processor_kwargs.fps=1: is not supported, only min_pixels"),
        ({"max_pixels": 1.5}, r"mm_processor_kwargs.max_pixels=1.5: must be a whole number"),
        ({"size": 5}, r"mm_processor_kwargs.size=5: must be an object with shortest_edge and longest_edge"),
        ({"size": {"height": 5}}, r"mm_processor_kwargs.size="),
        ({"do_image_splitting": 1}, r"mm_processor_kwargs.do_image_splitting=1: must be true or false"),
        ("max", r"mm_processor_kwargs='max': must be a JSON object such as"),
    ],
)
def test_options(wrong: Any, limit: str) -> None:
    with pytest.raises(InvalidArgument, match=limit):
        EngineConfig(model="model", mm_processor_kwargs=wrong)
    assert processing_options('{"max_pixels": 9}') == {"max_pixels": 9} and processing_options(None) == {}


def test_wrong_files_are_the_models_fault(tmp_path: Path) -> None:
    engine = reader(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**PICTURES[VARIANT].processor, "max_pixels": 10}))
    with pytest.raises(ModelError, match="max_pixels=10"):
        ImageReader.of(tmp_path, engine.encode, 4, 256)
