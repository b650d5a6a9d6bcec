"""Products by `mma.sync`, as products of weights of all formats: compared with float64 by `shipped`, and
compiled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ampere_products import AMPERE_PRODUCTS
from kernel_facts import AMPERE, AMPERE_THREADS, facts_elsewhere

from benchmarks.compiled_kernels import row
from benchmarks.machine import RESULTS
from pallas_kernels.compilation.ahead_of_time import device
from pallas_kernels.products.groups import Groups, grouped
from pallas_kernels.products.weights import stored
from pallas_kernels.quantization.formats import WeightFormat
from pallas_kernels.quantization.int4 import KINDS, Int4
from pallas_kernels.quantization.quantized import Quantized, dequantize, quantize
from tests.compiling import optimized
from tests.extras import compiler_for_gpus
from tests.kernels.interpreted import Runner, largest_error
from tests.kernels.test_int4 import packed
from tests.kernels.test_int4_product import rounded as rounded_weight

RECORD = json.loads((RESULTS / "compiled_kernels.json").read_text())
TARGET = "a100"  # its process has compiled for it, or for a newer one


def weight_of(outs: int, size: int, form: WeightFormat, dtype: str) -> tuple[Any, np.ndarray[Any, Any]]:
    """A random parameter [outs, size], and its values as kernels take them."""
    if form.numbers in KINDS:
        weight, values = packed(outs, size, form.group, offset=form.offset, kind=form.numbers)
        return weight, values if form.numbers == "e2m1" else rounded_weight(weight, dtype)
    floats = jnp.asarray(np.random.default_rng(size).normal(size=(outs, size)), dtype)
    if form.bits == 16:
        return floats, np.asarray(floats, np.float64)
    weight = quantize(
        floats.astype(jnp.float32), form.numbers, inputs=form.inputs is not None, by_group=bool(form.group)
    )
    return weight, np.asarray(dequantize(weight), np.float64)


def rounded(x: jax.Array, form: WeightFormat) -> np.ndarray[Any, Any]:
    """Rows, as a product in this format takes them."""
    rows = quantize(x, form.inputs, by_group=bool(form.group)) if form.inputs else None
    return np.asarray(x if rows is None else dequantize(rows), np.float64)


def on(target: str) -> dict[str, Any]:
    return {"impl": "mosaic", "device": device(target)}


def check(
    rows: int, outs: int, size: int, form: WeightFormat, dtype: str, *, runner: Runner, target: str = TARGET
) -> float:
    """The largest error, see `largest_error`."""
    weight, wide = weight_of(outs, size, form, dtype)
    x = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, size)), dtype)
    # Ampere's kernel rounds rows that are multiplied by their scales; otherwise numbers are multiplied first
    whole = x if form.group and target != "b200" else x.astype(jnp.float32)

    def run(x: jax.Array, weight: Int4 | Quantized) -> jax.Array:
        return stored(weight).on_gpu(x, jnp.dtype("float32"), **on(target))

    got, want = runner.run(run, x, weight), rounded(whole, form) @ wide.T
    assert got.dtype == jnp.float32 and got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())
    return largest_error(got, want)


def check_grouped(
    sizes: tuple[int, ...],
    outs: int,
    size: int,
    form: WeightFormat,
    dtype: str,
    *,
    runner: Runner,
    target: str = TARGET,
) -> float:
    """The largest error, see `largest_error`."""
    chosen = np.random.default_rng(outs).permutation(np.repeat(np.arange(len(sizes)), sizes))
    flat, wide = weight_of(len(sizes) * outs, size, form, dtype)
    weight = jax.tree.map(lambda array: array.reshape(len(sizes), outs, *array.shape[1:]), flat)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(len(chosen), size)), dtype)
    groups = grouped(jnp.asarray(chosen), len(sizes))

    def run(x: jax.Array, weight: Any, groups: Groups) -> jax.Array:
        return stored(weight).grouped_product(x[groups.row], groups, **on(target))[groups.place]

    got = np.asarray(runner.run(run, x, weight, groups), np.float64)
    want = np.einsum("ri,roi->ro", rounded(x, form), wide.reshape(len(sizes), outs, size)[chosen])
    np.testing.assert_allclose(got, want, rtol=float(jnp.finfo(dtype).eps), atol=1e-5 * np.abs(want).max())
    return largest_error(got, want)


def check_every_number(
    kind: str, dtype: str, *, runner: Runner, target: str = TARGET, outs: int = 64
) -> float:
    """Each eight-bit number is converted exactly, in each place of a word."""
    every = np.arange(256, dtype=np.uint8).view(jnp.dtype(kind))
    finite = every[np.isfinite(every.astype(np.float32))]
    numbers = np.array([np.resize(np.roll(finite, row), 128) for row in range(outs)])
    weight = Quantized(jnp.asarray(numbers), jnp.ones(outs, jnp.float32), dtype, kind=kind)

    def run(x: jax.Array, weight: Quantized) -> jax.Array:
        return stored(weight).on_gpu(x, jnp.dtype("float32"), **on(target))

    got = runner.run(run, jnp.eye(128, dtype=dtype), weight)
    np.testing.assert_array_equal(got, numbers.T.astype(np.float32))
    return 0.0


FEW = ("int4, groups of 128, 8 rows", "NVFP4, 64 rows", "int8, 8 rows", "experts, bfloat16")


def check_compiled(target: str, names: Sequence[str]) -> None:
    compiler_for_gpus()
    with optimized():
        every = facts_elsewhere(target, [AMPERE_PRODUCTS[name] for name in names])
    for name, facts in zip(names, every, strict=True):
        assert facts.name.startswith("product") and facts.spilled == 0 and not facts.misaligned, name
        wide = "bfloat16" in name  # shared memory for one block, on GPUs that have 100 KiB
        assert facts.blocks(AMPERE_THREADS) >= (3 if "8 rows" in name else 1 if wide else 2), name
        by_tma = target in ("b200", "rtx5090")
        assert facts.products > 0 and (facts.bulk_copies if by_tma else facts.copies) > 0, name
        if jax.__version__ == RECORD["machine"]["jax"]:  # others compile to other code
            assert row(name, facts) in RECORD["targets"][target]


@pytest.mark.parametrize(
    "target",
    [pytest.param(one, marks=[] if one in ("a100", "b200") else [pytest.mark.full]) for one in AMPERE],
)
def test_a_kernel_spills_nothing_and_fits(target: str) -> None:
    check_compiled(target, FEW)


@pytest.mark.full
@pytest.mark.parametrize("target", AMPERE)
def test_every_kernel_spills_nothing_and_fits(target: str) -> None:
    check_compiled(target, list(AMPERE_PRODUCTS))
