"""Attention's kernel for Ampere and newer GPUs: emulated, compared with float64, and compiled,
as cache writes and page copies are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ampere_attention import AMPERE_CASES
from kernel_facts import AMPERE, AMPERE_THREADS, facts_elsewhere

from benchmarks.compiled_kernels import row
from benchmarks.machine import RESULTS
from pallas_kernels.attention.ampere import (
    BLOCKS_TO_FILL,
    SPLIT_TOKENS,
    default_splits,
    latent_attention_prefill,
    paged_attention_decode,
    paged_attention_prefill,
)
from pallas_kernels.quantization.formats import FP8
from tests.compiling import optimized
from tests.extras import compiler_for_gpus
from tests.kernels import reference
from tests.kernels.emulated import Landing, emulator
from tests.kernels.interpreted import Cache, Runner, cache, largest_error, only_what_is_seen, options_of
from tests.kernels.reference import Float64
from tests.kernels.test_attention_decode import eight_bits

RECORD = json.loads((RESULTS / "compiled_kernels.json").read_text())
Ways = dict[str, Any]
PLAIN: Ways = {"scale": 0.2}
WINDOW: Ways = {"scale": 0.3, "window": 70}
CAP: Ways = {"scale": 0.5, "soft_cap": 3.0}
BOTH: Ways = {"scale": 0.3, "window": 33, "soft_cap": 20.0}
SINKS: Ways = {"scale": 0.3, "window": 70, "sinks": True}


def close(got: jax.Array, want: Float64, clean: Cache) -> float:
    """Within the rounding of weights and results to the dtype; everything else is float32.

    Returns:
        The largest error, see `largest_error`.
    """
    rounding = float(jnp.finfo(got.dtype).eps) / 2
    allowed = 1.05 * rounding * (np.abs(want) + float(jnp.abs(clean.v).max())) + 1e-5
    assert (np.abs(np.asarray(got, np.float64) - want) <= allowed).all()  # false where got is NaN
    return largest_error(got, want)


def check_decode(
    head_dim: int,
    kv_heads: int,
    group: int,
    page_size: int,
    splits: int | None,
    dtype: str,
    ways: Ways,
    runner: Runner,
    kind: str = "",
) -> float:
    """The largest error, see `largest_error`; kind: of an eight-bit cache."""
    lengths = [1, page_size - 1, 0, page_size + 1, 200]
    whole = cache(lengths, -(-200 // page_size), kv_heads, page_size, head_dim, dtype, seed=page_size)
    paged = only_what_is_seen(whole, np.array(lengths) - 1, lengths, ways.get("window"))
    clean = paged.clean()
    if kind:
        (whole, _), (paged, clean) = eight_bits(whole, kind), eight_bits(paged, kind)
    q = jax.random.normal(jax.random.key(7), (len(lengths), kv_heads * group, head_dim)).astype(dtype)
    options = options_of(ways, kv_heads * group)
    run = partial(paged_attention_decode, splits=splits)
    got = runner.run(run, q, *paged, options)
    if ways is WINDOW:  # what is behind it changes no bit
        np.testing.assert_array_equal(got, runner.run(run, q, *whole, options))
    assert (got[2] == 0).all()
    return close(got, reference.paged_attention_decode(q, *clean, options), clean)


def check_prefill(
    head_dim: int,
    kv_heads: int,
    group: int,
    page_size: int,
    splits: int | None,
    dtype: str,
    ways: Ways,
    runner: Runner,
    kind: str = "",
    rank: int = 0,
) -> float:
    """The largest error, see `largest_error`; kind: of an eight-bit cache; rank: of latent attention."""
    tile, sequences, width = 24, [150, 25, 120], -(-150 // page_size)
    paged = cache(sequences, width, kv_heads, page_size, head_dim, dtype, seed=page_size)
    rows, positions, lengths = np.array(
        [(0, 126, 24), (2, 0, 24), (1, 24, 1), (2, 24, 24), (2, 0, 0), (2, 110, 10)]
    ).T
    whole = paged._replace(tables=paged.tables[rows], lengths=jnp.asarray(lengths, jnp.int32))
    paged = only_what_is_seen(
        whole, positions, np.where(lengths > 0, positions + lengths, 0), ways.get("window")
    )
    clean = paged.clean()
    if kind:
        (whole, _), (paged, clean) = eight_bits(whole, kind), eight_bits(paged, kind)
    q = jax.random.normal(jax.random.key(7), (len(rows), tile, kv_heads * group, head_dim)).astype(dtype)
    starts = jnp.asarray(positions, jnp.int32)
    options = options_of(ways, kv_heads * group)
    run: Any = partial(paged_attention_prefill, splits=splits)
    if rank:
        run = partial(latent_attention_prefill, rank=rank, splits=splits)
        clean = clean._replace(v=clean.k[..., :rank])
    arrays = (paged.k, paged.tables) if rank else paged[:3]
    got = runner.run(run, q, *arrays, starts, paged.lengths, options)
    if ways is WINDOW:
        np.testing.assert_array_equal(got, runner.run(run, q, *whole[:3], starts, paged.lengths, options))
    assert jnp.isfinite(got).all()
    want = reference.paged_attention_prefill(q, *clean[:3], starts, paged.lengths, options)
    real = np.arange(tile) < lengths[:, None]
    return close(got[real], want[real], clean)


# head_dim, kv_heads, group, page_size, splits, dtype, ways, landing
DECODE = [
    (64, 2, 4, 64, None, "bfloat16", PLAIN, "late"),
    (64, 2, 4, 16, 1, "bfloat16", SINKS, "late"),
    pytest.param(64, 2, 4, 16, 2, "bfloat16", BOTH, "late", marks=pytest.mark.full),
    (64, 2, 4, 32, 2, "bfloat16", WINDOW, "early"),
    (128, 1, 9, 128, 3, "float16", BOTH, "late"),
    (256, 1, 4, 16, 1, "bfloat16", CAP, "late"),
    pytest.param(64, 1, 4, 64, 3, "float16", SINKS, "early", marks=pytest.mark.full),
]
PREFILL = [
    (64, 1, 3, 16, 2, "bfloat16", WINDOW, "late"),
    (64, 1, 3, 64, None, "bfloat16", SINKS, "early"),
    pytest.param(64, 1, 3, 64, None, "bfloat16", CAP, "early", marks=pytest.mark.full),
]
NAMES = ("head_dim", "kv_heads", "group", "page_size", "splits", "dtype", "ways", "landing")


@pytest.mark.parametrize(NAMES, DECODE)
def test_decode(
    head_dim: int,
    kv_heads: int,
    group: int,
    page_size: int,
    splits: int | None,
    dtype: str,
    ways: Ways,
    landing: Landing,
) -> None:
    check_decode(head_dim, kv_heads, group, page_size, splits, dtype, ways, emulator(landing))


@pytest.mark.parametrize(NAMES, PREFILL)
def test_prefill(
    head_dim: int,
    kv_heads: int,
    group: int,
    page_size: int,
    splits: int | None,
    dtype: str,
    ways: Ways,
    landing: Landing,
) -> None:
    check_prefill(head_dim, kv_heads, group, page_size, splits, dtype, ways, emulator(landing))


@pytest.mark.parametrize(
    ("rank", "page_size", "splits", "dtype", "tma"),
    [(128, 16, 2, "bfloat16", False), pytest.param(512, 64, 1, "float16", True, marks=pytest.mark.full)],
)
def test_latent_prefill(rank: int, page_size: int, splits: int, dtype: str, tma: bool) -> None:
    check_prefill(rank + 64, 1, 6, page_size, splits, dtype, PLAIN, emulator("late", tma), rank=rank)


def test_caches_of_eight_bits() -> None:
    check_decode(64, 2, 4, 16, 2, "bfloat16", WINDOW, emulator("late"), "int8")
    check_prefill(64, 1, 3, 16, 2, "bfloat16", SINKS, emulator("late", tma=True), FP8)


@pytest.mark.parametrize("landing", ["early", "late"])
def test_copies_by_tma(landing: Landing) -> None:
    """Pages smaller than a tile, so that many copies arrive at a barrier; and larger."""
    check_decode(64, 2, 4, 16, 2, "bfloat16", BOTH, emulator(landing, tma=True))
    check_prefill(64, 1, 3, 128, 1, "bfloat16", WINDOW, emulator(landing, tma=True))


SHAPES = [*itertools.product((64, 128, 256), (1, 8), (16, 64, 128), (PLAIN, WINDOW, CAP, BOTH))]
SPLITS = [
    (1, "bfloat16", "late"),
    (3, "float16", "early"),
    (2, "bfloat16", "early"),
    (1, "float16", "late"),
    (4, "bfloat16", "late"),
]


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_decode_and_prefill_everywhere(index: int) -> None:
    head_dim, group, page_size, ways = SHAPES[index]
    splits, dtype, landing = SPLITS[index % len(SPLITS)]  # five: every shape meets others
    for kind in ("", ("int8", FP8)[index % 2]):
        check_decode(head_dim, 2, group, page_size, splits, dtype, ways, emulator(landing), kind)
        check_prefill(head_dim, 2, group, page_size, splits, dtype, ways, emulator(landing), kind)


def test_splits_fill_the_chip_and_are_not_too_short() -> None:
    assert default_splits(items=1, kv_heads=8, tokens=1 << 20) == BLOCKS_TO_FILL // 8
    assert default_splits(items=256, kv_heads=8, tokens=1 << 20) == 1
    assert default_splits(items=1, kv_heads=1, tokens=4 * SPLIT_TOKENS) == 4
    assert default_splits(items=1, kv_heads=1, tokens=16) == 1


FEW = (
    "decode, head dim 128",
    "decode, head dim 256, pages of 16, window, cap",
    "prefill, head dim 128, pages of 16, window, cap",
    "decode, int8, head dim 128",
    "prefill, fp8, head dim 256",
    "write, 64 tokens, normed, rotated in part, head dim 256, fp8",
    "latent decode, 16 heads",
    "latent prefill, 16 heads",
    "copy, pages of 16, int8",
)


def check_compiled(target: str, names: Sequence[str]) -> None:
    compiler_for_gpus()
    with optimized():
        every = facts_elsewhere(target, [AMPERE_CASES[name] for name in names])
    for name, facts in zip(names, every, strict=True):
        assert facts.spilled == 0, name
        wide = "head dim 256" in name or "latent" in name  # shared memory for one block
        large = target in ("a100", "b200") and not wide
        assert facts.blocks(AMPERE_THREADS) >= (2 if large else 1), name
        if jax.__version__ == RECORD["machine"]["jax"]:  # others compile to other code
            assert row(name, facts) in RECORD["targets"][target]
        by_tma = target in ("b200", "rtx5090")
        if name.startswith(("write", "copy")):
            continue
        assert facts.products > 0 and (facts.bulk_copies if by_tma else facts.copies) > 0, name
        assert not facts.misaligned, name


@pytest.mark.parametrize(
    "target",
    [pytest.param(one, marks=[] if one in ("a100", "b200") else [pytest.mark.full]) for one in AMPERE],
)
def test_a_kernel_spills_nothing_and_fits(target: str) -> None:
    check_compiled(target, FEW)


@pytest.mark.full
@pytest.mark.parametrize("target", AMPERE)
def test_every_kernel_spills_nothing_and_fits(target: str) -> None:
    check_compiled(target, list(AMPERE_CASES))
