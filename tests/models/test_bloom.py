"""ALiBi by two channels of queries and keys."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.models.bloom import STEP, slopes


def test_slopes_of_powers_of_two_and_between() -> None:
    assert slopes(8) == [2.0**-i for i in range(1, 9)]
    assert slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_positions_are_exact(dtype: str) -> None:
    positions = np.arange(STEP * STEP)
    parts = jnp.stack([jnp.asarray(positions // STEP), jnp.asarray(positions % STEP)]).astype(dtype).astype(jnp.float32)
    assert np.array_equal(np.asarray(parts[0] * STEP + parts[1]), positions)
