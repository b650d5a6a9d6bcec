"""Four-bit weights times rows of bytes on a CPU: every form against exact sums."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels.llvm import calls, native
from pallas_kernels.llvm.kinds import INPUTS
from pallas_kernels.products.cpu import products as cpu_products
from pallas_kernels.products.cpu.int4_bytes import int4_bytes_module
from pallas_kernels.products.groups import grouped
from pallas_kernels.products.weight import form_key, forms_of
from pallas_kernels.products.weights import product, stored
from pallas_kernels.quantization.hadamard import block_of, transform
from pallas_kernels.quantization.int4 import GROUPS, HIGHEST, LOWEST, Int4, pack, quantize_int4, wide
from pallas_kernels.quantization.quantized import dequantize, quantize
from tests.kernels.interpreted import normal
from tests.kernels.test_masked import SETS, runs_here

few = settings(max_examples=2, deadline=None, phases=[Phase.generate])  # each is compiled
# rows, inputs, outputs
shapes = st.tuples(
    st.integers(1, 70), st.integers(1, 400), st.one_of(st.integers(1, 9), st.integers(10, 150))
)
packing = jax.jit(pack, static_argnames=("group", "inputs", "hadamard"))
quantizing = jax.jit(quantize_int4, static_argnames=("group", "hadamard", "inputs"))


def weights(outs: int, size: int, group: int, *, offset: bool, hadamard: int = 1) -> Int4:
    rng = np.random.default_rng(size)
    numbers = rng.integers(LOWEST, HIGHEST + 1, (outs, size)).astype(np.int8)
    by_group = outs, -(-size // group)
    scale, low = (
        jnp.asarray(x, jnp.float32) for x in (rng.uniform(0.5, 1.5, by_group), rng.normal(size=by_group))
    )
    how: dict[str, Any] = {"group": group, "hadamard": hadamard, "inputs": True}
    made: Int4 = packing(jnp.asarray(numbers), scale, low if offset else None, **how)
    return made


def exact(x: jax.Array, weight: Int4) -> np.ndarray[Any, Any]:
    """In float64, of the bytes and weights that are multiplied."""
    rows = jax.jit(lambda x: quantize(transform(x.astype(jnp.float32), weight.hadamard), "int8"))(x)
    numbers, scale = (np.asarray(part, np.float64) for part in (rows.values, rows.scale))
    return (numbers @ np.asarray(jax.jit(wide)(weight), np.float64).T) * scale[:, None]


def in_form(form: str, x: jax.Array, weight: Int4, dtype: str = "float32") -> np.ndarray[Any, Any]:
    forms = forms_of({form_key(x.shape[0], str(x.dtype), "w4a8"): form})
    lowered = jax.jit(lambda x, weight: stored(weight).with_forms(forms).product(x, dtype)).lower(x, weight)
    assert ("w4a8" in lowered.as_text()) == (form == "kernel")
    got = lowered.compile()(x, weight)
    assert got.dtype == dtype
    return np.asarray(got, np.float64)


@pytest.mark.parametrize("form", ["kernel", "xla"])
@pytest.mark.parametrize(
    ("x_dtype", "group"),
    [
        pytest.param(
            x_dtype, group, marks=[] if (x_dtype == "bfloat16") == (group == 128) else pytest.mark.full
        )
        for x_dtype in INPUTS
        for group in GROUPS
    ],
)
@few
@given(shape=shapes, dtype=st.sampled_from(INPUTS), offset=st.booleans())
def test_every_form_is_the_exact_product(
    form: str, x_dtype: str, group: int, shape: tuple[int, int, int], dtype: str, offset: bool
) -> None:
    rows, size, outs = shape
    check(form, weights(outs, size, group, offset=offset), rows, x_dtype, dtype)


def check(form: str, weight: Int4, rows: int, x_dtype: str, dtype: str = "float32") -> None:
    x = normal((rows, weight.shape[1]), rows, x_dtype)
    want, got = exact(x, weight), in_form(form, x, weight, dtype)
    rounding = 2.0**-8 if dtype == "bfloat16" else 0
    assert (np.abs(got - want) <= rounding * np.abs(want) + 4e-6 * np.abs(want).max() + 1e-9).all()


@pytest.mark.parametrize("x_dtype", INPUTS)
@pytest.mark.parametrize("size", [576, *(pytest.param(size, marks=pytest.mark.full) for size in (64, 1536))])
def test_rows_are_transformed(size: int, x_dtype: str) -> None:
    """Bytes may differ from XLA's by one where sums in another order are rounded."""
    weight = weights(9, size, 64, offset=True, hadamard=block_of(size))
    x = normal((5, size), 1, x_dtype)
    want = exact(x, weight)
    for form in ("kernel", "xla"):
        np.testing.assert_allclose(in_form(form, x, weight), want, rtol=0, atol=2e-3 * np.abs(want).max())


@pytest.mark.parametrize("x_dtype", INPUTS)
def test_a_row_is_the_same_alone_and_among_others(x_dtype: str) -> None:
    weight = weights(37, 192, 32, offset=True)
    x = normal((71, 192), 0, x_dtype)
    every = in_form("kernel", x, weight)
    for first, end in ((0, 1), (3, 5), (7, 15), (2, 71)):
        np.testing.assert_array_equal(in_form("kernel", x[first:end], weight), every[first:end])


def test_the_transform_spreads_outliers_of_activations() -> None:
    x, plain = normal((16, 512), 0).at[:, 7].mul(50), normal((64, 512), 1)

    def error(hadamard: int) -> float:
        """What bytes change, beside the same weights times floats."""
        weight = quantizing(plain, hadamard=hadamard, inputs=True)
        want = exact_of_floats(x, weight)
        return float(np.abs(np.asarray(jax.jit(product)(x, weight)) - want).mean())

    assert error(512) < error(1) / 4


def exact_of_floats(x: jax.Array, weight: Int4) -> np.ndarray[Any, Any]:
    return np.asarray(x, np.float64) @ np.asarray(jax.jit(dequantize)(weight), np.float64).T


def test_experts_round_their_inputs_too() -> None:
    weight = weights(2 * 24, 128, 128, offset=True, hadamard=128).map(lambda array: array.reshape(2, 24, -1))
    x = normal((9, 128), 3)
    groups = grouped(jnp.array([0, 1, 0, 0, 1, 1, 0, 1, 0]), 2)
    got = np.asarray(
        jax.jit(lambda x: stored(weight).grouped_product(x[groups.row], groups)[groups.place])(x)
    )
    every = [exact(x, weight[expert]) for expert in range(2)]
    want = np.stack([every[expert][row] for row, expert in enumerate([0, 1, 0, 0, 1, 1, 0, 1, 0])])
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-3 * np.abs(want).max())


@pytest.mark.parametrize("name", SETS)
def test_no_instruction_is_compiled_that_a_processor_lacks(name: str) -> None:
    triple, features, *_, lacking = SETS[name]
    target = native.Target(triple, features=features)
    text = native.assembly(int4_bytes_module(target, "bfloat16", 128, True), target)
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith((".", "#", "//")))
    assert not re.search(lacking, code)


@pytest.mark.parametrize(
    "name", ["avx2", *(pytest.param(name, marks=pytest.mark.full) for name in ("sse2", "avx512"))]
)
@pytest.mark.parametrize("group", [32, *(pytest.param(group, marks=pytest.mark.full) for group in (64, 128))])
def test_results_without_features(name: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    triple, features, *_ = SETS[name]
    target = native.Target(triple, features=features)
    if not runs_here(target):
        pytest.skip(f"this processor lacks {name}")
    monkeypatch.setattr(native, "host", lambda: target)
    monkeypatch.setattr(cpu_products, "register", lambda known, make: calls.register(f"{known}_{name}", make))
    for rows in (1, 7):
        check("kernel", weights(19, 200, group, offset=True), rows, "float32")
    assert dequantize(weights(3, 64, 32, offset=False)).shape == (3, 64)
