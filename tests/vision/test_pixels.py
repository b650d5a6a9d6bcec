"""Sizes, and forms of images that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jengine import InvalidArgument, ModelError
from jengine.vision.gemma4 import fitted
from jengine.vision.pixels import MOST_STRETCHED, fitting, most_fitting, rgb
from jengine.vision.qwen import Qwen3Vision

LARGE = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}


def test_sizes_are_those_of_transformers() -> None:
    with np.load(Path(__file__).parent.parent / "golden" / "fitted.npz") as file:
        cases = file["fitted"].tolist()
    assert len(cases) > 300
    for height, width, least, most, *expected in cases:
        assert [*fitting((height, width), 28, least, most)] == expected
        assert expected[0] * expected[1] <= most_fitting(28, least, most)


def test_the_most_pixels_are_a_bound() -> None:
    """Also where an extreme ratio leaves a side no choice."""
    for least, most in ((784, 784), (3136, 6000), (3136, 100000)):
        for ratio in (1, 7, 50, MOST_STRETCHED):
            for side in (1, 3, 40, 211):
                pixels = np.prod(fitting((side, ratio * side), 28, least, most))
                assert pixels <= most_fitting(28, least, most)


@pytest.mark.parametrize(
    ("height", "width", "few", "many"),
    [
        (480, 640, (7, 9), (14, 19)),
        (1920, 1080, (11, 6), (22, 12)),
        (7, 7, (8, 8), (16, 16)),
        (1, 1000, (1, 70), (1, 280)),
        (5000, 31, (70, 1), (212, 1)),
    ],
)
def test_gemma4_has_nearly_as_many_embeddings_as_are_allowed(
    height: int, width: int, few: tuple[int, int], many: tuple[int, int]
) -> None:
    """As transformers' get_aspect_ratio_preserving_size."""
    assert [fitted(height, width, 48, most) for most in (70, 280)] == [few, many]


def test_transparent_is_white() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    assert np.asarray(rgb(image)).tolist() == [[[255, 255, 255], [10, 20, 30]]]


def test_options_of_a_processor() -> None:
    def read(processor: dict[str, Any], overrides: dict[str, Any]) -> Qwen3Vision:
        size = {"patch_size": processor.get("patch_size", 14)}
        return Qwen3Vision({"vision_config": size, "image_token_id": 1}, processor, overrides=overrides)

    assert (read(LARGE, {}).least, read(LARGE, {}).most) == (65536, 16777216)
    older = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
    assert read(older, {}).most == 12845056
    assert read(older, {"max_pixels": 501760}).most == 501760
    assert read(older, {"size": {"longest_edge": 501760}}).most == 501760
    assert read(older, {"max_pixels": 501760}).largest == 501760 // 14**2
    with pytest.raises(InvalidArgument, match=r"^mm_processor_kwargs='pan': must be one of max_pixels, "):
        read(LARGE, {"pan": 1})
    with pytest.raises(
        InvalidArgument, match=r"^mm_processor_kwargs.max_pixels=100: must be at least min_pixels=65536"
    ):
        read(LARGE, {"max_pixels": 100})
    with pytest.raises(ModelError, match=r"^do_resize=False is not supported, only True"):
        read({**LARGE, "do_resize": False}, {})
