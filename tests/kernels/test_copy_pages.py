"""The kernel that copies pages against the reference: Hopper's form, interpreted on a CPU with race detection
on."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache.page_copy import copy_pages
from pallas_kernels.quantization.quantized import Pages, movable, quantize
from tests.kernels import reference
from tests.kernels.interpreted import INTERPRETED, Runner

SMALL = [
    (None, "bfloat16", 128, 2, 16),
    ("int8", "float16", 64, 1, 128),
    ("float8_e4m3fn", "bfloat16", 256, 1, 32),
]


def check(
    kind: str | None,
    dtype: str,
    head_dim: int,
    kv_heads: int,
    page_size: int,
    *,
    tma: bool = True,
    runner: Runner = INTERPRETED,
) -> float:
    """One page to two others, some with NaN, and padding. Returns the largest error, see `largest_error`."""
    rng = np.random.default_rng(page_size)
    shape = 9, kv_heads, page_size, head_dim

    def pages() -> Pages:
        plain = jnp.asarray(np.where(rng.random(shape) < 0.1, np.nan, rng.normal(size=shape)), dtype)
        return movable(quantize(plain, kind)) if kind else plain

    args: Any = pages(), pages(), jnp.array([5, 0, 3, 5, 0], jnp.int32), jnp.array([1, 0, 8, 7, 0], jnp.int32)
    got = runner.run(jax.jit(partial(copy_pages, tma=tma, **runner.form())), *args)
    for mine, want in zip(*map(jax.tree.leaves, (got, reference.copy_pages(*args))), strict=True):
        np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (mine, want)))
    return 0.0


@pytest.mark.parametrize(("kind", "dtype", "head_dim", "kv_heads", "page_size"), SMALL)
def test_the_reference_is_met(
    kind: str | None, dtype: str, head_dim: int, kv_heads: int, page_size: int
) -> None:
    check(kind, dtype, head_dim, kv_heads, page_size)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "head_dim", "page_size"),
    [*itertools.product((None, "int8", "float8_e4m3fn"), (64, 128, 256), (16, 32, 64, 192))],
)
def test_the_reference_is_met_everywhere(kind: str | None, head_dim: int, page_size: int) -> None:
    check(kind, "float16", head_dim, 3, page_size)
