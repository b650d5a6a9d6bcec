"""Adapted weights: products with the sum of a weight, in any format, and each row's own adapter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.products.adapted import Adapted, Stack
from pallas_kernels.products.groups import grouped
from pallas_kernels.products.weights import weight_of
from pallas_kernels.quantization.int4 import quantize_int4
from pallas_kernels.quantization.quantized import quantize

ROWS, PLACES, COLUMNS, INPUTS = 5, 3, 16, 128
OUTS = 4, 6  # [4, 6, inputs], in parts of the second axis: 2 of the first, 3 of the second, 1 of the first
SEGMENTS = ((0, 2), (1, 3), (0, 1))
OWNER = [0, 2, -1, 1, 2]  # place of each row's adapter; -1: none


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mask_of(owner: list[int]) -> np.ndarray:
    return np.asarray(owner)[:, None] == np.arange(PLACES * COLUMNS) // COLUMNS


def formats(weight: np.ndarray) -> dict[str, Any]:
    return {
        "plain": jnp.asarray(weight),
        "int8": quantize(jnp.asarray(weight), dtype="int8"),
        "w8a8": quantize(jnp.asarray(weight), dtype="int8", inputs=True),
        "int4": quantize_int4(jnp.asarray(weight), group=64, parts=1, hadamard=1),
        "w4a8": quantize_int4(jnp.asarray(weight), group=64, parts=1, hadamard=1, inputs=True),
    }


@pytest.mark.parametrize("kind", ["plain", "int8", "w8a8", "int4", "w4a8"])
def test_each_row_has_its_own_change(kind: str) -> None:
    base = weight_of(formats(numbers(*OUTS, INPUTS))[kind])
    a = numbers(2, PLACES * COLUMNS, INPUTS, seed=1) / 10
    b = [numbers(OUTS[0], size, PLACES * COLUMNS, seed=2 + i) for i, (_, size) in enumerate(SEGMENTS)]
    mask = mask_of(OWNER)
    stack = Stack(jnp.asarray(a), tuple(map(jnp.asarray, b)), tuple(part for part, _ in SEGMENTS))
    x = jnp.asarray(numbers(ROWS, INPUTS, seed=9))
    weight = Adapted(base, stack, jnp.asarray(mask))
    assert weight.shape == (*OUTS, INPUTS)
    found = jax.jit(lambda x, weight: weight.product(x))(x, weight)
    alone = jax.jit(lambda x, weight: weight.product(x))(x, base)
    for row, place in enumerate(OWNER):
        if place < 0:
            np.testing.assert_array_equal(found[row], alone[row])
            continue
        own = slice(place * COLUMNS, (place + 1) * COLUMNS)
        inner = np.asarray(x)[row].astype(np.float64) @ a[:, own].transpose(0, 2, 1)
        added = [one[..., own] @ inner[part] for (part, _), one in zip(SEGMENTS, b, strict=True)]
        expected = np.asarray(alone[row], np.float64) + np.concatenate(added, axis=1).reshape(-1)
        np.testing.assert_allclose(found[row], expected, atol=1e-4)


@pytest.mark.parametrize("columns", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_place(columns: int, dtype: str) -> None:
    """Nor on what other places hold."""
    base = weight_of(jnp.asarray(numbers(32, INPUTS), dtype))
    a, b = numbers(columns, INPUTS, seed=1), numbers(32, columns, seed=2)
    found = []
    for place in range(4):
        every_a, every_b = (
            numbers(1, 4 * columns, INPUTS, seed=3 + place),
            numbers(32, 4 * columns, seed=place),
        )
        own = slice(place * columns, (place + 1) * columns)
        every_a[0, own], every_b[:, own] = a, b
        mask = np.zeros((3, 4 * columns), bool)
        mask[1, own] = True
        every_a, every_b = (jnp.asarray(one, dtype) for one in (every_a, every_b))
        weight = Adapted(base, Stack(every_a, (every_b,), (0,)), jnp.asarray(mask))
        x = jnp.asarray(numbers(3, INPUTS, seed=9), dtype)
        found.append(np.asarray(jax.jit(lambda x, weight: weight.product(x))(x, weight)[1]))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


BAD = 1  # the place of an adapter whose products are infinite and NaN; row 3 of OWNER has it


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("use", ["product", "grouped", "expert", "take"])
def test_an_adapter_beyond_all_numbers_changes_its_own_rows_alone(use: str, dtype: str) -> None:
    """Its numbers are the largest of the dtype, so that what it adds is not finite. Other rows have the bits
    that they have beside zeros.
    """
    experts, chosen = 2, jnp.asarray([0, 1, 1, 0, 1], jnp.int32)
    first = () if use in ("product", "take") else (experts,)
    x = jnp.asarray(numbers(ROWS, INPUTS, seed=9), dtype)
    base = weight_of(jnp.asarray(numbers(*first, OUTS[0], INPUTS), dtype))
    healthy = (
        numbers(*first, 1, PLACES * COLUMNS, INPUTS, seed=1),
        numbers(*first, OUTS[0], PLACES * COLUMNS, seed=2),
    )
    mask, place = jnp.asarray(mask_of(OWNER)), slice(BAD * COLUMNS, (BAD + 1) * COLUMNS)

    def run(x: jax.Array, weight: Adapted) -> jax.Array:
        if use == "product":
            return weight.product(x)
        if use == "take":
            return weight.take(jnp.asarray([3, 1, 0, 2, 1], jnp.int32))
        if use == "expert":
            rows = jnp.arange(ROWS, dtype=jnp.int32)
            return weight.of_expert(jnp.int32(1), rows).product(x)
        groups = grouped(chosen, experts)
        return weight.grouped_product(x[groups.row], groups)[groups.place]

    found = []
    for number in (0.0, float(jnp.finfo(dtype).max)):
        a, b = (one.copy() for one in healthy)
        a[..., place, :] = number * np.where(numbers(*a[..., place, :].shape, seed=5) > 0, 1, -1)
        b[..., place] = number
        weight = Adapted(base, Stack(jnp.asarray(a, dtype), (jnp.asarray(b, dtype),), (0,)), mask)
        found.append(np.asarray(jax.jit(run)(x, weight)))
    others = [row for row, owner in enumerate(OWNER) if owner != BAD]
    np.testing.assert_array_equal(found[1][others], found[0][others])
    assert np.isfinite(found[1][others].astype(np.float32)).all()
    assert not np.isfinite(found[1][OWNER.index(BAD)].astype(np.float32)).all()
