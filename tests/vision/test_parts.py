"""Attention of encoders: pictures that share a bucket do not share anything else."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.vision.parts import Attention, within_runs, within_segments

SEGMENTS = np.repeat([1, 2, 3, 0], [12, 9, 7, 4]).astype(np.int32)  # three pictures and padding
KINDS: dict[str, Callable[[jax.Array], Attention]] = {
    "segments": within_segments,
    "runs": lambda segments: within_runs(segments, 12),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_picture_that_overflows_changes_no_other(kind: str, dtype: str) -> None:
    draw, shape = np.random.default_rng(0), (len(SEGMENTS), 2, 8)
    healthy = [draw.standard_normal(shape).astype(dtype) for _ in range(3)]
    attend = jax.jit(lambda *qkv: KINDS[kind](jnp.asarray(SEGMENTS))(*qkv))
    expected = np.asarray(attend(*healthy))
    for part in range(3):  # queries, keys, values
        for bad in (np.inf, -np.inf, np.nan):
            arrays = [one.copy() for one in healthy]
            arrays[part][SEGMENTS == 2] = bad
            found = np.asarray(attend(*arrays))
            np.testing.assert_array_equal(found[SEGMENTS != 2], expected[SEGMENTS != 2])
            assert not np.isfinite(found[SEGMENTS == 2]).any()
