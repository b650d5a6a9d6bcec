"""The kernels for latent attention against float64: Hopper's is interpreted on a CPU with race
detection on, Ampere's emulated.
"""

from __future__ import annotations

import itertools
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import targets
from pallas_kernels.attention import ampere
from pallas_kernels.attention.hopper.latent import head_blocks, latent_attention_decode
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.work_list import even_work, fixed_work
from tests.kernels import reference
from tests.kernels.emulated import emulator
from tests.kernels.interpreted import INTERPRETED, Runner, cache, largest_error
from tests.kernels.semaphores_model import at_once

# rank, channels of position, heads, page_size, thread blocks (negative: with cuts at fixed places), dtype
SMALL = [
    (128, 64, 128, 16, 5, "float16"),
    pytest.param(256, 64, 20, 32, -4, "bfloat16", marks=pytest.mark.full),
    pytest.param(512, 64, 64, 64, 4, "bfloat16", marks=pytest.mark.full),
]
LONGEST = 700  # tokens: it is split


def check(
    rank: int,
    position: int,
    heads: int,
    page_size: int,
    blocks: int,
    dtype: str,
    *,
    longest: int = LONGEST,
    runner: Runner = INTERPRETED,
) -> float:
    """What no query sees is NaN. Returns the largest error, see `largest_error`.

    Args:
        blocks: of Hopper's kernel; 0: Ampere's kernel.
    """
    lengths = [1, page_size - 1, 0, page_size, page_size + 1, longest, 129]
    paged = cache(lengths, -(-longest // page_size), 1, page_size, rank + position, dtype, seed=page_size)
    clean = paged.clean()
    q = jnp.asarray(np.random.default_rng(7).normal(size=(len(lengths), heads, rank + position)), dtype)
    how: dict[str, Any] = {"kv_heads": head_blocks(heads)[0], "blocks": abs(blocks)}
    same: dict[str, Any] = {"options": AttentionOptions(0.1), "rank": rank}
    run: Any = partial(ampere.latent_attention_decode, splits=2, **same)
    if blocks:
        divide = (
            partial(even_work, **how)
            if blocks > 0
            else partial(fixed_work, tokens=paged.tables.shape[1] * page_size, **how)
        )
        work = jax.jit(divide)(paged.lengths)
        run = jax.jit(partial(latent_attention_decode, work=work, **same, **runner.form(in_place=False)))
    got = np.asarray(runner.run(run, q, paged.k, paged.tables, paged.lengths), np.float32)
    want = reference.paged_attention_decode(q, clean.k, clean.k[..., :rank], *paged[2:], same["options"])
    # What is rounded to dtype: each weight, and the result. Anything else is float32.
    rounding = float(jnp.finfo(dtype).eps) / 2
    allowed = 1.05 * rounding * (np.abs(want) + float(jnp.abs(clean.k).max())) + 1e-5
    assert got.shape == want.shape and (np.abs(got - want) <= allowed).all()  # false where got is NaN
    assert (got[2] == 0).all()
    return largest_error(got, want)


@pytest.mark.parametrize(("rank", "position", "heads", "page_size", "blocks", "dtype"), SMALL)
def test_the_reference_is_met(
    rank: int, position: int, heads: int, page_size: int, blocks: int, dtype: str
) -> None:
    check(rank, position, heads, page_size, blocks, dtype)


@pytest.mark.parametrize(
    ("rank", "heads", "page_size", "tma"),
    [(128, 20, 64, False), pytest.param(512, 16, 16, True, marks=pytest.mark.full)],
)
def test_the_reference_is_met_on_ampere(rank: int, heads: int, page_size: int, tma: bool) -> None:
    check(rank, 64, heads, page_size, 0, "bfloat16", longest=130, runner=emulator("late", tma))


def test_blocks_that_run_at_the_same_time_join_parts_without_races() -> None:
    with at_once():
        check(128, 64, 16, 64, 3, "bfloat16")


SHAPES = [*itertools.product((128, 384), (1, 16, 64, 128), (16, 64, 128))]
# five: every shape meets others
BLOCKS_AND_DTYPES = [(1, "bfloat16"), (4, "float16"), (7, "bfloat16"), (-4, "float16"), (6, "bfloat16")]


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_the_reference_is_met_everywhere(index: int) -> None:
    rank, heads, page_size = SHAPES[index]
    check(rank, 64, heads, page_size, *BLOCKS_AND_DTYPES[index % len(BLOCKS_AND_DTYPES)])


def test_the_grid_does_not_depend_on_the_row_bucket() -> None:
    def grids(rows: int) -> list[str]:
        q, tables = (
            jax.ShapeDtypeStruct((rows, 16, 192), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows, 64), jnp.int32),
        )
        pages, lengths = (
            jax.ShapeDtypeStruct((100, 1, 64, 192), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        )
        attend = partial(latent_attention_decode, options=AttentionOptions(0.1), rank=128)
        return re.findall(r"\bgrid=(\(.*?\))", str(jax.make_jaxpr(attend)(q, pages, tables, lengths)))

    assert grids(8) == grids(256) == [f"({targets.CORES},)"]
