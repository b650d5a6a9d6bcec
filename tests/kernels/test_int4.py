"""Four-bit weights: how they are packed and chosen, and products with them on a CPU in every form."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels.llvm import calls, native
from pallas_kernels.llvm.formats import processor
from pallas_kernels.llvm.kinds import INPUTS
from pallas_kernels.products.cpu import products as cpu_products
from pallas_kernels.products.cpu.int4 import in_pairs, int4_module
from pallas_kernels.products.cpu.int4_row import int4_row_module
from pallas_kernels.products.weight import form_key, forms_of
from pallas_kernels.products.weights import prepare, product, stored
from pallas_kernels.quantization.int4 import (
    E2M1,
    GROUPS,
    HIGHEST,
    KINDS,
    LOWEST,
    Int4,
    groups,
    pack,
    pack_on_host,
    quantize_int4,
    words,
)
from pallas_kernels.quantization.quantized import dequantize
from tests.kernels.interpreted import normal
from tests.kernels.test_masked import SETS, runs_here

FULL = [
    ("bfloat16", 2),
    ("bfloat16", 64),
    ("bfloat16", 192),
    ("float32", 2),
    ("float32", 288),
    ("float32", 512),
]
few = settings(max_examples=2, deadline=None, phases=[Phase.generate])  # each is compiled
# rows, inputs, outputs
shapes = st.tuples(
    st.integers(1, 70), st.integers(1, 400), st.one_of(st.integers(1, 9), st.integers(10, 150))
)


# an operation alone would be compiled for each shape, too
packing = jax.jit(pack, static_argnames=("group", "parts", "kind"))
quantizing = jax.jit(quantize_int4, static_argnames=("group", "parts", "hadamard", "inputs"))
wide_values = jax.jit(dequantize)


def packed(
    outs: int, size: int, group: int, *, offset: bool, parts: int = 1, kind: str = "int4"
) -> tuple[Int4, np.ndarray[Any, Any]]:
    """Random quantized weights, whose inputs divide into groups, and their values."""
    rng = np.random.default_rng(size)
    numbers = rng.integers(LOWEST, HIGHEST + 1, (outs, size))
    if kind == "e2m1":
        numbers = np.array([*E2M1, *(-n for n in E2M1)])[numbers + 8]
    scale, low = (
        rng.uniform(0.5, 1.5, (outs, size // group)),
        rng.normal(size=(outs, size // group)) if offset else None,
    )
    if kind == "e2m1":  # a power of two, as of MXFP4
        scale = 2.0 ** rng.integers(-9, 3, scale.shape)
    wide = numbers * np.repeat(scale.astype(np.float32), group, 1)
    if low is not None:
        wide = wide + np.repeat(low.astype(np.float32), group, 1).astype(np.float64)
    given_low = None if low is None else jnp.asarray(low)
    made = packing(
        jnp.asarray(numbers, jnp.int8), jnp.asarray(scale), given_low, group=group, parts=parts, kind=kind
    )
    return made, wide


def multiplied(wide: np.ndarray[Any, Any], x_dtype: str) -> np.ndarray[Any, Any]:
    """Weights as a CPU's kernel multiplies them: rounded to bfloat16 where it multiplies pairs of these, else
    to float32.
    """
    pairs = in_pairs(processor(native.host()), x_dtype)
    rounded = wide.astype(np.float32).astype(jnp.bfloat16) if pairs else wide
    return rounded.astype(np.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
@pytest.mark.parametrize(
    ("size", "parts", "group"), [(576, 1, 32), (1536, 1, 64), (256, 2, 128), (192, 2, 32), (64, 1, 64)]
)
@pytest.mark.parametrize("offset", [False, True])
def test_the_host_packs_as_devices_do(
    kind: str, leading: tuple[int, ...], size: int, parts: int, group: int, offset: bool
) -> None:
    rng = np.random.default_rng(size)
    numbers = rng.integers(LOWEST, HIGHEST + 1, (*leading, size)).astype(np.int8)
    if kind == "e2m1":
        numbers = np.array([*E2M1, *(-n for n in E2M1)], np.int8)[numbers + 8]
    scale = rng.normal(size=(*leading, size // group)).astype(np.float32)
    how: dict[str, Any] = {"group": group, "parts": parts, "kind": kind}
    expected = packing(
        jnp.asarray(numbers), jnp.asarray(scale), jnp.asarray(-scale) if offset else None, **how
    )
    found = pack_on_host(numbers, scale, -scale if offset else None, **how)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(ours, np.ndarray) and ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(
    ("size", "group", "parts"), [(32, 32, 1), (192, 64, 1), (576, 32, 1), (384, 128, 3), (192, 32, 2)]
)
def test_what_is_packed_is_found_again(size: int, group: int, parts: int, offset: bool, kind: str) -> None:
    made, wide = packed(3, size, group, offset=offset, parts=parts, kind=kind)
    assert made.shape == (3, size) and made.values.shape == (3, parts * words(size // parts))
    assert made.scale.shape == (3, parts * groups(size // parts, group))
    np.testing.assert_allclose(wide_values(made), wide, rtol=1e-6, atol=1e-6)


def test_words_hold_neighbours_as_the_kernel_takes_them() -> None:
    numbers = np.zeros((1, 128), np.int8)
    numbers[0, 32 * 1 + 2 * 5 + 1] = -3  # input 43: step 1, word 5, the second of a pair
    values = np.asarray(pack(jnp.asarray(numbers), jnp.ones((1, 4)), None, group=32).values)
    assert np.flatnonzero(values[0]).tolist() == [5] and values[0, 5] == (-3 & 15) << 20


def test_a_part_is_what_a_device_has() -> None:
    """Each half of a split weight holds the values for that half of the inputs."""
    made, wide = packed(2, 320, 32, offset=True, parts=2)
    halves = [
        made.map(partial(lambda half, array: jnp.split(array, 2, axis=1)[half], half)) for half in range(2)
    ]
    np.testing.assert_allclose(
        np.concatenate([wide_values(half) for half in halves], 1), wide, rtol=1e-6, atol=1e-6
    )


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    group=st.sampled_from(GROUPS),
    magnitude=st.floats(-10, 10),
    outliers=st.floats(0, 3),
)
def test_searched_scales_lose_no_more_than_rounded_ones(
    seed: int, group: int, magnitude: float, outliers: float
) -> None:
    """Squared errors of each group, weighted by magnitudes, are at most those of the scale that maps the
    largest magnitude to -8.
    """
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(3, 2, group)) * 10.0 ** (magnitude + outliers * rng.random((3, 2, group)))).astype(
        np.float32
    )
    made = quantizing(jnp.asarray(x.reshape(3, -1)), group=group, parts=2)
    assert made.shape == (3, 2 * group) and made.offset is None
    largest = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)
    rounded = np.clip(np.round(x / (largest / LOWEST)), LOWEST, HIGHEST) * (largest / LOWEST)
    found = np.asarray(wide_values(made)).reshape(x.shape)
    weight = np.abs(x) + np.sqrt(np.square(np.float64(x)).mean(-1, keepdims=True))
    errors = [(weight * np.square(np.float64(other) - x)).sum(-1) for other in (found, rounded)]
    assert (errors[0] <= errors[1] * 1.001).all()
    assert errors[0].sum() < 0.99 * errors[1].sum()


def test_constant_groups_are_exact() -> None:
    x = jnp.concatenate([jnp.full((2, 128), 3.25), jnp.zeros((2, 64))], 1)
    np.testing.assert_allclose(wide_values(quantizing(x)), x, rtol=1e-6)


def test_indices_of_leading_axes() -> None:
    made, wide = packed(6, 64, 32, offset=True)
    stacked = made.map(lambda array: array.reshape(2, 3, -1))
    assert stacked.shape == (2, 3, 64)
    np.testing.assert_allclose(wide_values(stacked[1]), wide[3:], rtol=1e-6, atol=1e-6)


def in_form(form: str, x: jax.Array, weight: Int4, dtype: str) -> np.ndarray[Any, Any]:
    forms = forms_of({form_key(x.shape[0], str(x.dtype), stored(weight).format.name): form})
    lowered = jax.jit(lambda x, weight: stored(weight).with_forms(forms).product(x, dtype)).lower(x, weight)
    name = {"kernel": "jengine_product", "row": "jengine_row"}.get(form)
    assert name in lowered.as_text() if name else "jengine_" not in lowered.as_text()
    got = lowered.compile()(x, weight)
    assert got.dtype == dtype
    return np.asarray(got, np.float64)


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
def test_the_kernel_is_the_exact_product(
    x_dtype: str, group: int, shape: tuple[int, int, int], dtype: str, offset: bool
) -> None:
    check_product(x_dtype, group, shape, dtype, offset, "int4")


@pytest.mark.parametrize("x_dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_the_kernel_is_the_exact_product_of_mxfp4(x_dtype: str) -> None:
    check_product(x_dtype, 32, (5, 200, 19), "float32", False, "e2m1")


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_kernel_is_the_exact_product_of_nvfp4(x_dtype: str, rows: int) -> None:
    check_product(x_dtype, 16, (rows, 200, 19), "float32", False, "e2m1")
    check_product(x_dtype, 16, (rows, 256, 136), "float32", True, "int4")


def check_product(
    x_dtype: str, group: int, shape: tuple[int, int, int], dtype: str, offset: bool, kind: str
) -> None:
    rows, size, outs = shape
    weight, wide = packed(outs, -(-size // group) * group, group, offset=offset, kind=kind)
    x = normal((rows, weight.shape[1]), rows, x_dtype)
    want = np.asarray(x, np.float64) @ multiplied(wide, x_dtype).T
    by_row = cpu_products.by_row(processor(native.host()), x_dtype, stored(weight).format)
    for form in ("kernel", "row") if rows == 1 and by_row else ("kernel",):
        got = in_form(form, x, weight, dtype)
        rounding = 2.0**-8 if dtype == "bfloat16" else 0
        error = rounding * np.abs(want) + 4e-6 * np.abs(want).max() + 1e-9
        if form == "row":
            error = error + of_integers(np.asarray(x, np.float64), wide)
        assert (np.abs(got - want) <= error).all()


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e-38])
def test_a_row_with_numbers_beyond_integers(number: float) -> None:
    """What is no number stays none, in the outputs of all weights, and tiny numbers do not become one."""
    weight, _ = packed(9, 256, 32, offset=True)
    got = in_form("row", jnp.zeros((1, 256)).at[0, 200].set(number), weight, "float32")
    assert np.isfinite(got).all() if number == 1e-38 else not np.isfinite(got).any()


def of_integers(x: np.ndarray[Any, Any], wide: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The most by which a product changes if rows are rounded to integers of 16 bits, in tiles of 128."""
    padding = (0, 0), (0, -x.shape[1] % 128)
    x, wide = np.pad(x, padding), np.pad(wide, padding)
    half = np.abs(x.reshape(len(x), -1, 128)).max(2) / 32767 / 2
    return half @ np.abs(wide.reshape(len(wide), -1, 128)).sum(2).T


@pytest.mark.parametrize(
    ("x_dtype", "block"), [("bfloat16", 512), *(pytest.param(*of, marks=pytest.mark.full) for of in FULL)]
)
def test_inputs_are_transformed(block: int, x_dtype: str) -> None:
    x = normal((70, 2 * block), 1, x_dtype)
    weight = quantizing(normal((9, 2 * block), 2), group=32, hadamard=block)
    want = np.asarray(x, np.float64) @ np.asarray(wide_values(weight), np.float64).T
    for form in ("kernel", "xla"):
        for rows in (1, 70):
            got = in_form(form, x[:rows], weight, "float32")
            np.testing.assert_allclose(
                got, want[:rows], atol=(2e-2 if x_dtype == "bfloat16" else 1e-5) * np.abs(want).max()
            )


@pytest.mark.parametrize("size", [127, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 200))])
def test_groups_that_are_not_full(size: int) -> None:
    x = normal((3, size), 1)
    weight = quantizing(normal((9, size), 2))
    want = np.asarray(x, np.float64) @ np.asarray(wide_values(weight), np.float64).T
    for form in ("kernel", "xla"):
        np.testing.assert_allclose(in_form(form, x, weight, "float32"), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("x_dtype", INPUTS)
def test_a_row_is_the_same_alone_and_among_others(x_dtype: str) -> None:
    weight, _ = packed(37, 192, 32, offset=True)
    x = normal((71, 192), 0, x_dtype)
    every = in_form("kernel", x, weight, "float32")
    for first, end in ((0, 1), (3, 5), (7, 15), (2, 71)):
        np.testing.assert_array_equal(in_form("kernel", x[first:end], weight, "float32"), every[first:end])


def test_weights_are_unpacked_once_for_all_rows() -> None:
    """What multiplies several rows holds no look-up."""
    triple, features, *_ = SETS["avx512bf16"]
    target = native.Target(triple, "znver4", features)
    functions = int4_module(target, "bfloat16", 128, True).split("define ")[1:]
    where = {re.split(r"[@\"(]+", text)[1] for text in functions if "permvar" in text}
    assert where == {"alone", "single", "unpack"}
    assert 'call void @"unpack"' in next(text for text in functions if '@"multiply"' in text.splitlines()[0])


def test_xla_dequantizes_in_the_dtype_of_activations() -> None:
    weight, wide = packed(5, 64, 32, offset=True)
    half = weight.map(lambda array: array)
    got = jax.jit(product)(jnp.ones((2, 64), jnp.float16), half)  # no kernel takes it
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(got, np.float32), np.tile(wide.sum(1), (2, 1)), rtol=2e-2, atol=0.2)


@pytest.mark.parametrize(("name", "cpu"), [*((name, "") for name in SETS), ("avx512bf16", "znver4")])
def test_no_instruction_is_compiled_that_a_processor_lacks(name: str, cpu: str) -> None:
    triple, features, *_, lacking = SETS[name]
    target = native.Target(triple, cpu, features)
    for x_dtype in INPUTS:
        for module in (int4_module, int4_row_module):
            text = native.assembly(module(target, x_dtype, 32, True), target)
            lines = (line for line in text.splitlines() if not line.lstrip().startswith((".", "#", "//")))
            code = "\n".join(lines)
            assert not re.search(lacking, code)
            pairs = cpu == "znver4" and x_dtype == "bfloat16" and module is int4_module
            assert ("vdpbf16ps" in code) == pairs


@pytest.mark.parametrize(
    "name", ["avx2", *(pytest.param(name, marks=pytest.mark.full) for name in ("sse2", "avx512"))]
)
def test_results_without_features(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triple, features, *_ = SETS[name]
    target = native.Target(triple, features=features)
    if not runs_here(target):
        pytest.skip(f"this processor lacks {name}")
    monkeypatch.setattr(native, "host", lambda: target)
    monkeypatch.setattr(cpu_products, "register", lambda known, make: calls.register(f"{known}_{name}", make))
    for (outs, size), kind, offset, group in (
        ((9, 160), "int4", True, 32), ((3, 320), "int4", False, 64), ((9, 160), "e2m1", False, 16),
    ):  # fmt: skip
        weight, wide = packed(outs, size, group, offset=offset, kind=kind)
        forms = forms_of({form_key(1, "bfloat16", stored(weight).format.name): "row"})
        for rows in (5, 1):
            x = normal((rows, size), 0, "bfloat16")
            called = jax.jit(lambda x, weight: weight.product(x, jnp.float32))
            formed = stored(weight).with_forms(forms)
            lowered = called.lower(x, formed)
            form = "row" if rows == 1 else "product"
            assert re.search(rf"jengine_{form}_\w*_{name}", lowered.as_text())
            want = np.asarray(x, np.float64) @ wide.T
            error = of_integers(np.asarray(x, np.float64), wide).max() if rows == 1 else 0.0
            got = lowered.compile()(x, formed)
            np.testing.assert_allclose(got, want, atol=3e-6 * np.abs(want).max() + error)


def test_a_gpu_gets_xlas_form() -> None:
    weight, _ = packed(64, 128, 128, offset=True)
    text = jax.jit(product).trace(jnp.ones((4, 128)), weight).lower(lowering_platforms=("cuda",)).as_text()
    assert "jengine" not in text and re.search(r"dot_general", text)


def test_without_llvmlite_xla_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.devices.cpu_refused", lambda: "llvmlite is not installed")
    weight, wide = packed(4, 64, 64, offset=False)
    lowered = jax.jit(product).lower(jnp.ones((1, 64)), weight)
    assert "jengine" not in lowered.as_text()
    np.testing.assert_allclose(
        lowered.compile()(jnp.ones((1, 64)), weight)[0], wide.sum(1), rtol=1e-5, atol=1e-4
    )
    prepare(weight)
