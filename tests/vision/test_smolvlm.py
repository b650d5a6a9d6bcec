"""SmolVLM's images as transformers' processor makes them, and its prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jengine.text.tokenizer import Tokenizer
from jengine.vision.folder import vision_of
from jengine.vision.reader import with_images
from jengine.vision.smolvlm import SmolVlm
from tests.golden.images import CASES, pictures, write_image_model


@pytest.mark.parametrize("variant", ["smolvlm", "idefics3"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_pixels_and_prompt(case: int, variant: str, tmp_path: Path) -> None:
    write_image_model(tmp_path, variant)
    tokenizer = Tokenizer.load(tmp_path)
    vision = vision_of(tmp_path, lambda text: tokenizer.encode(text, add_special_tokens=False))
    assert isinstance(vision, SmolVlm)
    with np.load(Path(__file__).parents[1] / "golden" / f"{variant}_with_images.npz") as file:
        text, prompt, pixels = (file[f"{name}_{case}"] for name in ("text", "prompt", "pixels"))
    found, images = with_images(vision, tokenizer.encode(str(text)), pictures(variant, case), "image")
    assert found == prompt.tolist() and images is not None
    assert images.positions == [i for i, token in enumerate(found) if token == vision.row_token]
    assert images.rows <= vision.most_rows * len(CASES[case].sizes)
    across = vision.side // vision.scale
    for part, frame in zip(images.parts, pixels, strict=True):
        blocks = part.pixels.reshape(
            across, across, vision.scale, vision.scale, 3, vision.patch, vision.patch
        )
        whole = blocks.transpose(4, 0, 2, 5, 1, 3, 6).reshape(frame.shape)
        assert np.abs(whole - (frame / np.float32(255) - 0.5) / 0.5).max() < 1e-6
