"""Eight-bit numbers and products of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.products.weight import form_key, forms_of
from pallas_kernels.products.weights import product, stored
from pallas_kernels.quantization.quantized import Quantized, dequantize, quantize

KINDS = {"int8": 0.5 / 127, "float8_e4m3fn": 1 / 16}  # error of a number over its row's largest, at most


@settings(max_examples=40)
@given(st.sampled_from(sorted(KINDS)), st.integers(0, 2**32 - 1), st.floats(-25, 25))
def test_a_row_is_near_what_it_stands_for(kind: str, seed: int, magnitude: float) -> None:
    rows = np.random.default_rng(seed).normal(size=(4, 32)) * 10.0**magnitude
    rows[1] = 0.0
    x = jnp.asarray(rows, jnp.float32)
    error = np.abs(np.asarray(dequantize(quantize(x, kind))) - np.asarray(x))
    assert np.all(error <= KINDS[kind] * np.abs(np.asarray(x)).max(-1, keepdims=True) * 1.0001)
    assert np.isfinite(np.asarray(quantize(x, kind).scale)).all()


def test_rows_do_not_enter_each_other() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 16)), jnp.float32)
    whole, one = quantize(x, "int8"), quantize(x[2:3], "int8")
    np.testing.assert_array_equal(whole[2:3].values, one.values)
    np.testing.assert_array_equal(whole[2:3].scale, one.scale)


@pytest.mark.parametrize("rows", [1, 8, 64, 100])
@pytest.mark.parametrize("outputs", [64, 192, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_alone(kind: str, outputs: int, rows: int) -> None:
    """The result equals the product with the dequantized weights."""
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.normal(size=(n, 96)), jnp.float32) for n in (rows, outputs))
    quantized = quantize(weight, kind)
    np.testing.assert_allclose(
        jax.jit(product)(x, quantized), np.asarray(x) @ np.asarray(dequantize(quantized)).T, atol=1e-4
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_too(kind: str, dtype: str) -> None:
    """The result equals the product of both dequantized operands; int8 sums are exact."""
    rng = np.random.default_rng(2)
    x, weight = (jnp.asarray(rng.normal(size=(n, 96)), dtype) for n in (5, 64))
    right = quantize(weight, kind, inputs=True)
    left = quantize(x, kind)
    wide = [np.asarray(side.values, np.float32) * np.asarray(side.scale)[:, None] for side in (left, right)]
    got = jax.jit(product, static_argnums=2)(x, right, "float32")
    np.testing.assert_allclose(got, wide[0] @ wide[1].T, rtol=1e-4, atol=1e-4)
    assert product(x, right).dtype == x.dtype


def test_an_int8_product_multiplies_int8() -> None:
    """It must not convert to a wider type, which is slower than the processor's int8 instructions."""
    x, weight = jax.ShapeDtypeStruct((8, 128), jnp.float32), jax.ShapeDtypeStruct((256, 128), jnp.float32)
    quantized = jax.eval_shape(lambda w: quantize(w, "int8", inputs=True), weight)
    given = stored(quantized).with_forms(forms_of({form_key(8, "float32", "w8a8"): "xla"}))
    text = jax.jit(product).lower(x, given).as_text()
    assert "tensor<8x128xi8>, tensor<256x128xi8>) -> tensor<8x256xi32>" in text


def test_slices_of_leading_axes() -> None:
    weight = quantize(
        jnp.asarray(np.random.default_rng(3).normal(size=(3, 4, 8)), jnp.float32), "int8", inputs=True
    )
    one: Quantized = weight[1]
    assert one.shape == (4, 8) and one.scale.shape == (4,) and one.inputs
