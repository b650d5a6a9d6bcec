"""ALiBi: slopes, by head and device."""

from __future__ import annotations

import dataclasses

import numpy as np

from jengine.checkpoints.hugging_face import model_config
from jengine.models.gpt import laid_slopes, slopes
from tests.golden.weights import VARIANTS


def test_slopes_of_powers_of_two_and_between() -> None:
    assert slopes(8) == [2.0**-i for i in range(1, 9)]
    assert slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


def test_slopes_follow_the_layout_of_heads() -> None:
    """Six heads on four devices have two more for padding; on eight devices each head has a copy."""
    config, known = model_config(VARIANTS["bloom"]), slopes(6)
    assert np.array_equal(laid_slopes(dataclasses.replace(config, shards=4)), [*known, 0, 0])
    assert np.array_equal(
        laid_slopes(dataclasses.replace(config, shards=8)), [*np.repeat(known, 2), 0, 0, 0, 0]
    )
