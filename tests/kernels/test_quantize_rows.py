"""Rows that are summed, normalized or gated, and quantized, by one kernel, interpreted on a CPU with race
detection on.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import devices
from pallas_kernels.elementwise import activations
from pallas_kernels.elementwise.norm import rms_norm
from pallas_kernels.products import quantize_rows as row_dispatch
from pallas_kernels.products import weight as products
from pallas_kernels.products.hopper.quantize_rows import GATES, Norm, quantize_rows
from pallas_kernels.products.quantize_rows import ROW_QUANTIZATION
from pallas_kernels.products.rows import Gated, Normed, Sum, array_of
from pallas_kernels.products.support import EIGHT_BIT_ROWS
from pallas_kernels.products.weights import product
from pallas_kernels.quantization.quantized import Quantized, quantize
from pallas_kernels.targets import why_none
from tests.kernels.interpreted import INTERPRETED, Runner, largest_error

HOPPER: Any = SimpleNamespace(
    device_kind="NVIDIA H200", platform="gpu", compute_capability="9.0", core_count=132
)
# kind, dtype, sum, norm, activation, rows, size
CASES = [
    ("float8_e4m3fn", "bfloat16", True, True, None, 3, 640),
    ("int8", "bfloat16", False, False, "silu", 2, 384),
]
MORE = [
    ("int8", "bfloat16", True, True, None, 2, 2048),
    ("float8_e4m3fn", "float16", False, True, None, 3, 128),
    ("float8_e4m3fn", "bfloat16", False, False, "relu", 1, 1024),
    ("int8", "float32", False, False, None, 5, 384),
    ("float8_e4m3fn", "bfloat16", False, False, None, 4, 5120),
]


def numbers(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def whole(scale: jax.Array, size: int) -> np.ndarray:
    """Scales [rows] or [rows, groups], for each of `size` numbers of a row."""
    scales = np.asarray(scale).reshape(len(scale), -1)
    return np.repeat(scales, size // scales.shape[1], axis=1)


def check(
    kind: str,
    dtype: str,
    add: bool,
    norm: bool,
    gate: str | None,
    rows: int,
    size: int,
    *,
    by_group: bool = False,
    runner: Runner = INTERPRETED,
) -> float:
    """The largest error, see `largest_error`. Pallas does not interpret `by_group`."""
    x, y, weight = (
        numbers(i, *shape, dtype=dtype)
        for i, shape in enumerate(((rows, size * (2 if gate else 1)), (rows, size), (size,)))
    )
    x = x.at[-1].set(0)
    how: Any = {"add": y if add else None, "norm": Norm(weight, 1e-5, 1.0) if norm else None, "gate": gate}
    forms = {"places": rows + 3, "by_group": by_group, **runner.form()}

    def run(x: jax.Array, **how: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        values, scale, total = quantize_rows(x, kind, **how, **forms)
        assert values.shape == (rows + 3, size)  # of which the last are undefined
        return values[:rows], scale[..., :rows].T, total

    values, scale, total = runner.run(run, x, **how)
    want = x + y if add else x
    assert (total is not None) == add
    assert total is None or (total == want).all()
    want = rms_norm(want, weight, 1e-5, 1.0) if norm else want
    want = activations.gated(want.reshape(rows, -1, 2), gate) if gate else want
    stored = quantize(want, kind, by_group=by_group)
    np.testing.assert_allclose(scale, stored.scale, rtol=1e-2)
    step = whole(stored.scale, size) * np.maximum(
        1, np.abs(np.asarray(stored.values, np.float32)) / (127 if kind == "int8" else 8)
    )
    got = np.asarray(values, np.float32) * whole(scale, size)
    np.testing.assert_array_less(np.abs(got - np.asarray(want, np.float32)), step + 1e-30)
    assert not np.asarray(values[rows - 1]).astype(bool).any() or add, "zeros stay zeros"
    return largest_error(got, np.asarray(want, np.float32))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_sum_norm_and_quantization_one_after_the_other(case: Any) -> None:
    check(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_of_them(case: Any) -> None:
    check(*case)


@pytest.mark.parametrize("name", GATES)
def test_activations_are_those_of_other_devices(name: str) -> None:
    x = jnp.linspace(-20, 20, 999)
    np.testing.assert_allclose(GATES[name](x), activations.ACTIVATIONS[name](x), rtol=1e-5, atol=1e-7)


def test_a_sum_is_computed_once() -> None:
    def traced(x: jax.Array, y: jax.Array, weight: jax.Array) -> Any:
        whole = Sum(x, y)
        return Normed(whole, weight, 1e-5).__jax_array__(), array_of(Sum(whole, y)), whole * 2

    x, y, weight = (numbers(i, *shape, dtype=jnp.float32) for i, shape in enumerate(((2, 4), (2, 4), (4,))))
    adds = [
        one
        for one in jax.make_jaxpr(traced)(x, y, weight).eqns
        if one.primitive.name == "add" and one.outvars[0].aval.shape == (2, 4)
    ]
    assert len(adds) == 2
    normed, more, twice = traced(x, y, weight)
    np.testing.assert_array_equal(normed, rms_norm(x + y, weight, 1e-5))
    np.testing.assert_array_equal(more, x + y + y)
    np.testing.assert_array_equal(twice, (x + y) * 2)
    mixed = Sum(x, y.astype(jnp.bfloat16))
    assert mixed.parts is None and mixed.dtype == jnp.float32, "the kernel would round it to x's dtype or y's"


@pytest.mark.parametrize("hadamard", [1, 128])
@pytest.mark.parametrize("rows", [9, 513])
def test_a_kernel_quantizes_what_a_product_for_hopper_takes(
    monkeypatch: pytest.MonkeyPatch, rows: int, hadamard: int
) -> None:
    """With its sum and norm, unless a transform lies between; products of more rows are XLA's."""
    taken: list[str] = []

    def quantizes(
        x: jax.Array,
        kind: str,
        *,
        add: Any = None,
        norm: Any = None,
        gate: Any = None,
        places: int | None = None,
        by_group: bool,
    ) -> Any:
        assert not by_group
        named = {"sum": add, "norm": norm, "gate": gate}
        taken.append(
            " ".join(
                ["quantize", str(x.dtype), *(name for name, given in named.items() if given is not None)]
            )
        )
        size = x.shape[1] // (1 if gate is None else 2)
        return (
            jnp.zeros((places or len(x), size), kind),
            jnp.zeros(places or len(x)),
            None if add is None else x + add,
        )

    def multiplies(x: jax.Array, *arrays: Any, dtype: Any, x_scale: jax.Array, **how: Any) -> jax.Array:
        taken.append(f"product of {len(x)}, {len(x_scale)}")
        return jnp.zeros((len(x), 64), dtype)

    monkeypatch.setattr("pallas_kernels.products.hopper.quantize_rows.quantize_rows", quantizes)
    monkeypatch.setattr("pallas_kernels.products.hopper.grouped_product.grouped_product", multiplies)
    for module in products, devices:
        monkeypatch.setattr(module, "traced_for", lambda: HOPPER)
    x, y, weight = numbers(0, rows, 128), numbers(1, rows, 128), numbers(2, 128)
    stored = quantize(numbers(3, 64, 128), "int8", inputs=True, hadamard=hadamard)
    whole = Sum(x, y)
    assert product(Normed(whole, weight, 1e-5), stored).shape == (rows, 64)
    assert (whole.parts is None) and (array_of(whole) == x + y).all()
    product(Gated(numbers(4, rows, 128, 2), "silu"), stored)
    plain = hadamard > 1
    multiplied = [] if rows > EIGHT_BIT_ROWS else ["product of 16, 16"]
    first, second = (
        ("quantize float32",) * 2 if plain else ("quantize bfloat16 sum norm", "quantize bfloat16 gate")
    )
    assert taken == [first, *multiplied, second, *multiplied]


def test_what_the_kernel_takes_and_why_not() -> None:
    x, ampere = numbers(0, 2, 128), SimpleNamespace(device_kind="NVIDIA A100", compute_capability="8.0")
    assert why_none(ROW_QUANTIZATION, HOPPER, x) is None
    assert (
        why_none(ROW_QUANTIZATION, HOPPER, Gated(numbers(0, 2, 96, 2), "silu"))
        == "size=96: the kernel takes multiples of 128"
    )
    assert (
        why_none(ROW_QUANTIZATION, HOPPER, x.astype(jnp.int8))
        == "dtype=int8: the kernel takes bfloat16, float16, float32"
    )
    assert (
        why_none(ROW_QUANTIZATION, ampere, x)
        == "device=NVIDIA A100: the kernel is for GPUs of compute capability 9.0"
    )  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"impl='mosaic': device="):
        row_dispatch.quantize_rows(x, "int8", impl="mosaic")
    values, scale = row_dispatch.quantize_rows(x, "int8", places=8)
    stored: Quantized = quantize(x, "int8")
    np.testing.assert_array_equal(values[:2], stored.values)
    np.testing.assert_array_equal(scale[:2], stored.scale)
    assert values.shape == (8, 128) and scale.shape == (8,)
