"""Images as arrays, with the results of transformers' processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

BILINEAR, BICUBIC = 2, 3  # Pillow's numbers of filters, as in preprocessor_config.json
MOST_STRETCHED = 200  # the longer side of an image to the shorter


def rgb(image: Image) -> Image:
    """The image in red, green and blue, upon white where it is transparent."""
    from PIL.Image import alpha_composite, fromarray, new

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # Pillow would clip
        shades, clear = np.asarray(image).astype(np.int32), image.info.get("transparency")
        image = fromarray((shades >> 8).astype(np.uint8))
        if clear is not None:
            image.putalpha(fromarray(np.where(shades == clear, 0, 255).astype(np.uint8)))
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return alpha_composite(new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


def normalized(image: Image, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """An RGB image as float32 [3, height, width]: values of 0 to 1, less the mean, divided by std."""
    shades = (np.arange(256) / 255).astype(np.float32)
    tables = ((shades - np.float32(m)) / np.float32(s) for m, s in zip(mean, std, strict=True))
    channels = np.asarray(image).transpose(2, 0, 1)
    return np.stack([table[channel] for table, channel in zip(tables, channels, strict=True)])


def fitting(size: tuple[int, int], factor: int, least: int, limit: int) -> tuple[int, int]:
    """Height and width near those of an image: multiples of `factor`, of `least` to `limit` pixels, with the
    same ratio as nearly as possible (Qwen2-VL's smart_resize).
    """
    height, width = (round(side / factor) * factor for side in size)
    if height * width > limit:
        shrink = math.sqrt(size[0] * size[1] / limit)
        height, width = (max(factor, math.floor(side / shrink / factor) * factor) for side in size)
    elif height * width < least:
        stretch = math.sqrt(least / (size[0] * size[1]))
        height, width = (math.ceil(side * stretch / factor) * factor for side in size)
    return height, width


def most_fitting(factor: int, least: int, limit: int) -> int:
    """The most pixels of a size that `fitting` gives."""
    side, sides = math.sqrt(least), math.sqrt(MOST_STRETCHED) + math.sqrt(1 / MOST_STRETCHED)
    stretched = least + factor * side * sides + factor**2
    return int(max(limit, stretched, factor * math.sqrt(MOST_STRETCHED * limit)))


def squares(grid: tuple[int, int], side: int) -> np.ndarray:
    """The order of a grid's cells if squares of side x side cells follow one another: rows and columns, int32
    [cells, 2].
    """
    places = np.indices(grid, np.int32).transpose(1, 2, 0)
    squared = places.reshape(grid[0] // side, side, grid[1] // side, side, 2)
    ordered: np.ndarray = squared.swapaxes(1, 2).reshape(-1, 2)
    return ordered


def patches(image: np.ndarray, size: int, order: np.ndarray) -> np.ndarray:
    """Patches of size x size pixels: float32 [3, height, width] -> [patches, 3, size, size], in the order of
    rows and columns [patches, 2].
    """
    channels, height, width = image.shape
    cells = image.reshape(channels, height // size, size, width // size, size).transpose(1, 3, 0, 2, 4)
    ordered: np.ndarray = cells[order[:, 0], order[:, 1]]
    return ordered
