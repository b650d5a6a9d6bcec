"""Images for the tiny models: drawn from their names, and prompts with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from tests.golden.declaring import without
from tests.golden.weights import VARIANTS, uniform

EACH = 5  # tokens of text before, between and after images


class Pictures(NamedTuple):
    """What is recorded with a variant.

    Attributes:
        processor: its preprocessor_config.json.
        sizes: width and height of its images, and their mode.
    """

    processor: dict[str, Any]
    sizes: tuple[tuple[int, int, str], ...]


_SIZES = ((61, 37, "RGB"), (9, 70, "RGBA"), (24, 24, "L"), (150, 90, "RGB"))
_QWEN3 = {
    **{"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2},
    **{"size": {"shortest_edge": 256, "longest_edge": 2400}},
    **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
}
# published with the older names of limits
_QWEN2 = {**without(_QWEN3, "size", "image_mean", "image_std"), "min_pixels": 256, "max_pixels": 2400}
_GEMMA3 = {"size": {"height": 40, "width": 40}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_GEMMA4 = {"patch_size": 2, "pooling_kernel_size": 3, "max_soft_tokens": 70}
PICTURES = {
    "gemma3_images": Pictures(_GEMMA3, _SIZES),
    "gemma4_images": Pictures(_GEMMA4, (*_SIZES[:2], (4, 150, "RGB"))),
    "qwen2_5_vl": Pictures(_QWEN2, _SIZES),
    "qwen3_5": Pictures(_QWEN3, _SIZES),
    "qwen3_5_moe": Pictures(_QWEN3, _SIZES[:2]),
    "qwen3_vl": Pictures(_QWEN3, _SIZES),
    "qwen3_vl_moe": Pictures(_QWEN3, _SIZES[:2]),
}


def picture(variant: str, width: int, height: int, mode: str) -> Image.Image:
    """Noise upon a slope, so that neither resizing nor rounding leaves it as it is."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    noise = uniform(f"{variant}/{width}x{height}", width * height * bands).reshape(height, width, bands)
    slope = np.linspace(-60, 60, width)[:, None] * np.linspace(-1, 1, bands)
    shades = np.clip(128 + slope + 40 * noise, 0, 255).astype(np.uint8)
    return Image.fromarray(shades if bands > 1 else shades[..., 0], mode=mode)


def pictures(variant: str) -> list[Image.Image]:
    return [picture(variant, *size) for size in PICTURES[variant].sizes]


def text(variant: str, count: int) -> list[list[int]]:
    """Tokens before, between and after `count` images."""
    config = VARIANTS[variant]
    usual = min(config.get("image_token_id", 63), config.get("text_config", config)["vocab_size"]) - 4
    noise = uniform(f"{variant}/text", (count + 1) * EACH) / np.sqrt(12.0) + 0.5
    return (noise * usual).astype(int).reshape(count + 1, EACH).tolist()
