"""The kernels that write keys and values against the reference: Hopper's is interpreted on a CPU with race
detection on, Ampere's executed by `shipped`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache import ampere_write
from pallas_kernels.cache.hopper_write import BLOCK_BYTES, heads_per_block, kv_write
from pallas_kernels.cache.qkv import HeadNorm, QkvProduct
from pallas_kernels.quantization.quantized import Pages, Quantized, dequantize, movable, quantize
from pallas_kernels.targets import CORES
from tests.kernels import reference
from tests.kernels.interpreted import INTERPRETED, Runner, largest_error, more_scales

NUM_PAGES = 7

# cache, dtype, head_dim, kv_heads, group, page_size, tokens, pairs, how: "norm", "gemma" (an offset in the
# norm) or "apart"
SMALL = [
    (None, "bfloat16", 128, 2, 2, 16, 13, 64, ""),
    (None, "float16", 64, 1, 3, 64, 5, 0, ""),
    (None, "bfloat16", 64, 3, 1, 32, 8, 24, "norm"),
    ("int8", "bfloat16", 128, 1, 2, 16, 9, 32, "norm"),
    ("float8_e4m3fn", "bfloat16", 256, 1, 1, 32, 3, 128, "gemma"),
    (None, "bfloat16", 128, 2, 1, 16, 1, 64, "apart"),
]


def check(
    kind: str | None,
    dtype: str,
    head_dim: int,
    kv_heads: int,
    group: int,
    page_size: int,
    tokens: int,
    pairs: int,
    how: str,
    *,
    cores: int | None = CORES,
    runner: Runner = INTERPRETED,
) -> float:
    """The largest error, see `largest_error`; cores: for Hopper's kernel, None: Ampere's."""
    rng = np.random.default_rng(tokens)
    places = rng.permutation(np.arange(page_size, NUM_PAGES * page_size))[:tokens]
    real = np.arange(tokens) % 3 != 1
    places[~real] %= page_size  # padding, in the null page
    rows = np.where(
        real[:, None, None, None], rng.normal(size=(tokens, kv_heads, group + 3, head_dim)), np.nan
    )
    rows[0] = 0
    norm = None
    if how in ("norm", "gemma"):
        weights = (jnp.asarray(rng.normal(size=head_dim), dtype) for _ in "qk")
        norm = HeadNorm(*weights, 1e-5, 1.0 if how == "gemma" else 0.0)
    qkv: Any = QkvProduct(jnp.asarray(rows, dtype), group, norm)  # with a row that attention does not read
    if how == "apart":
        qkv = qkv.split()
    angles = rng.uniform(-3, 3, size=(tokens, pairs))
    rotation = (
        (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
        if pairs
        else None
    )
    nothing: Pages = jnp.full((NUM_PAGES, kv_heads, page_size, head_dim), jnp.nan, dtype)
    old = movable(quantize(nothing, kind)) if kind else nothing  # NaN scales
    at = places // page_size, places % page_size
    args: Any = (old, old, qkv, *(jnp.asarray(x, jnp.int32) for x in at))
    rows = (0, 5, 8, tokens)[tokens % 4]
    kernel = partial(kv_write, cores=cores, **runner.form()) if cores else ampere_write.kv_write
    run = jax.jit(partial(kernel, rows=min(rows, tokens)))
    given = (more_scales(old), more_scales(old), *args[2:]) if isinstance(old, Quantized) else args
    queries, got = runner.run(run, *given, rotation=rotation)
    got = [
        replace(pages, scale=pages.scale[:, :kv_heads]) if isinstance(pages, Quantized) else pages
        for pages in got
    ]
    wanted_queries, wanted = jax.jit(partial(reference.kv_write, rows=rows))(*args, rotation=rotation)
    plain = rotation is None and norm is None
    assert [len(part) for part in queries] == [min(rows, tokens), tokens - min(rows, tokens)]
    error = compare(
        *(np.concatenate(part).astype(np.float32)[real] for part in (queries, wanted_queries)),
        dtype,
        exact=plain,
    )
    written = at[0][real], slice(None), at[1][real]
    for new, want in zip(got, wanted, strict=True):
        exact = plain and kind is None
        new_error = compare(numbers_at(new, written), numbers_at(want, written), kind or dtype, exact=exact)
        error = max(error, new_error)
        untouched = np.ones((NUM_PAGES, page_size), bool)
        untouched[at[0][real], at[1][real]] = False
        for now, before in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
            np.testing.assert_array_equal(
                *(np.asarray(x, np.float32).swapaxes(1, 2)[untouched] for x in (now, before))
            )
    return error


def numbers_at(pages: Pages, where: Any) -> np.ndarray:
    """float32 [tokens, kv_heads, head_dim]."""
    return np.asarray(
        dequantize(replace(pages, dtype="float32")) if isinstance(pages, Quantized) else pages, np.float32
    )[where]


def compare(got: np.ndarray, want: np.ndarray, kind: str, *, exact: bool) -> float:
    """Rotation and scales are in float32; the rounded results may differ by one step of the cache's dtype.

    Returns:
        The largest error, see `largest_error`.
    """
    step = (
        np.abs(want).max(-1, keepdims=True) / 127
        if kind == "int8"
        else np.abs(want) * float(jnp.finfo(kind).eps) + 1e-6
    )
    assert (np.abs(got - want) <= (0 if exact else step * 1.01)).all()  # false where one is NaN
    return largest_error(got, want)


@pytest.mark.parametrize("case", SMALL)
def test_the_reference_is_met(case: tuple[Any, ...]) -> None:
    check(*case)


SHAPES = [
    *itertools.product(
        (None, "int8", "float8_e4m3fn"), (64, 128, 256), (16, 64, 128), (0, 24, 32), (1, 8, 27)
    )
]
# four: every shape meets others
HEADS_AND_DTYPES = [(1, "bfloat16"), (2, "float16"), (5, "bfloat16"), (3, "float16")]
GROUPS_AND_WAYS = [*itertools.product((1, 4), ("", "norm", "gemma", "apart"))][:-1]  # seven, likewise


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_the_reference_is_met_everywhere(index: int) -> None:
    kind, head_dim, page_size, pairs, tokens = SHAPES[index]
    kv_heads, dtype = HEADS_AND_DTYPES[index % len(HEADS_AND_DTYPES)]
    group, how = GROUPS_AND_WAYS[index % len(GROUPS_AND_WAYS)]
    check(kind, dtype, head_dim, kv_heads, group, page_size, tokens, pairs, how)


def test_blocks_fill_the_chip_and_then_grow() -> None:
    head, blocks = 8 * 128 * 2, partial(heads_per_block, cores=100)
    assert blocks(tiles=2, kv_heads=8, head_bytes=head) == 1
    assert blocks(tiles=100, kv_heads=8, head_bytes=head) == 4
    assert blocks(tiles=2000, kv_heads=8, head_bytes=head) == 8
    assert blocks(tiles=2000, kv_heads=64, head_bytes=head) == BLOCK_BYTES // head
    assert blocks(tiles=2000, kv_heads=5, head_bytes=BLOCK_BYTES) == 1


def test_floats_are_rounded_to_fp8_as_by_hardware() -> None:
    every = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    numbers = np.unique(every[np.isfinite(every)])
    between = (numbers[1:] + numbers[:-1]) / 2  # ties
    x = np.concatenate([numbers, between, *(np.nextafter(between, side * np.inf) for side in (-1, 1))])
    got = ampere_write.stored(jnp.asarray(x, jnp.float32), "float8_e4m3fn")
    np.testing.assert_array_equal(got, x.astype(jnp.float8_e4m3fn).view(np.uint8))
