"""Positions of three numbers: cases beside those of the golden tests."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jengine.models.rope import Rope
from jengine.scheduling.requests.images import mrope
from jengine.vision.family import VISUAL


def test_text_alone() -> None:
    positions, delta = mrope([5, 6, 7], [])
    assert positions.tolist() == [[0, 1, 2]] * 3 and delta == 0
    positions, delta = mrope([], [])
    assert positions.shape == (3, 0) and delta == 0


def test_images_that_touch_and_end_a_prompt() -> None:
    positions, delta = mrope([5, *[VISUAL] * 8], [(1, 2), (2, 3)])
    assert positions.tolist() == [
        [0, 1, 1, 3, 3, 3, 3, 3, 3],
        [0, 1, 1, 3, 3, 3, 4, 4, 4],
        [0, 1, 2, 3, 4, 5, 3, 4, 5],
    ]
    assert delta == 6 - 9


def test_equal_numbers_rotate_as_one() -> None:
    """Bit for bit, so text does not depend on whether a program allows for images."""
    rope = Rope((1.0, 0.3, 0.01), 1.5, (0, 1, 2))
    positions = jnp.array([0, 3, 1000])
    for one, three in zip(rope.cos_sin(positions), rope.cos_sin(jnp.stack([positions] * 3)), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(three).tobytes()
