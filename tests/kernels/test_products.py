"""Products on a CPU: every form against exact sums, on shapes that no block divides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jengine.execution import loras
from pallas_kernels.llvm.blocks import CHUNK
from pallas_kernels.llvm.formats import SIZES
from pallas_kernels.llvm.kinds import INPUTS, WEIGHTS
from pallas_kernels.products.cpu.multiply import ROWS
from pallas_kernels.products.weight import ROW_CLASSES, form_key, forms_of
from pallas_kernels.products.weights import prepare, product, stored
from pallas_kernels.quantization.hadamard import block_of, gain, transform
from pallas_kernels.quantization.quantized import Quantized, dequantize, quantize
from tests.compiling import optimized
from tests.kernels.interpreted import normal

ROOT = Path(__file__).parents[2]
KINDS = (*WEIGHTS, "w8a8", "fp8 inputs")
# rows, inputs, outputs
shapes = st.tuples(
    st.integers(1, 80), st.integers(1, 300), st.one_of(st.integers(1, 9), st.integers(10, 150))
)
few = settings(max_examples=3, deadline=None, phases=[Phase.generate])  # each is compiled


quantized = jax.jit(quantize, static_argnames=("dtype", "inputs", "hadamard"))


def arrays(
    rows: int, size: int, outs: int, x: str, kind: str, *, spread: bool = True
) -> tuple[jax.Array, Any]:
    """spread: inputs of w8a8, in the largest blocks that divide them."""
    inputs, weight = (
        normal((rows, size), rows, x),
        normal((outs, size), outs, kind if kind in INPUTS else "float32"),
    )
    if kind in INPUTS:
        return inputs, weight
    stored = "float8_e4m3fn" if kind in ("float8_e4m3fn", "fp8 inputs") else "int8"
    hadamard = block_of(size) if kind == "w8a8" and spread else 1
    return inputs, quantized(weight, stored, inputs=kind in ("w8a8", "fp8 inputs"), hadamard=hadamard)


def exact(x: jax.Array, weight: Any) -> np.ndarray[Any, Any]:
    """The product in float64, of the numbers that the kernel multiplies."""
    if isinstance(weight, Quantized):
        if weight.inputs:
            x = dequantize(
                jax.jit(lambda x: quantize(transform(x.astype(jnp.float32), weight.hadamard), weight.kind))(x)
            )
        return (
            np.asarray(x, np.float64)
            @ (
                np.asarray(weight.values.astype(jnp.float32), np.float64)
                * np.asarray(weight.scale, np.float64)[:, None]
            ).T
        )
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


def has_kernel(lowered: Any) -> bool:
    return "jengine_product" in lowered.as_text()


def in_form(form: str, x: jax.Array, weight: Any, dtype: str) -> np.ndarray[Any, Any]:
    forms = forms_of({form_key(x.shape[0], str(x.dtype), kind): form for kind in KINDS})
    lowered = jax.jit(lambda x, weight: stored(weight).with_forms(forms).product(x, dtype)).lower(x, weight)
    assert has_kernel(lowered) == (form != "xla")
    got = lowered.compile()(x, weight)
    assert got.dtype == dtype
    return np.asarray(got, np.float64)


@pytest.mark.parametrize(
    ("form", "x_dtype", "kind"),
    [
        *(("kernel", x, kind) for x in INPUTS for kind in KINDS),
        *(("xla", *both) for both in zip([*INPUTS] * 3, KINDS, strict=True)),
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "int8"),
    ],
)
@few
@given(shape=shapes, dtype=st.sampled_from(INPUTS))
def test_every_form_is_the_exact_product(
    form: str, kind: str, x_dtype: str, shape: tuple[int, int, int], dtype: str
) -> None:
    x, weight = arrays(*shape, x_dtype, kind)
    want = exact(x, weight)
    got = in_form(form, x, weight, dtype)
    # where XLA may round weights, or sums, on their way
    converted = form == "xla" and "bfloat16" in (x_dtype, kind)
    rounding = 2.0**-8 if dtype == "bfloat16" or converted else 0
    assert (
        np.abs(got - want)
        <= rounding * np.abs(want) + (1e-2 if converted else 2e-6) * np.abs(want).max() + 1e-9
    ).all()


@pytest.mark.parametrize("x_dtype", INPUTS)
def test_bytes_are_those_of_xla_to_the_last_bit(x_dtype: str) -> None:
    @few
    @given(shape=shapes)
    def check(shape: tuple[int, int, int]) -> None:
        x, weight = arrays(*shape, x_dtype, "w8a8", spread=False)
        got, want = (in_form(form, x, weight, "float32") for form in ("kernel", "xla"))
        np.testing.assert_array_equal(got, want)

    with optimized():
        check()


@pytest.mark.parametrize("x_dtype", INPUTS)
@pytest.mark.parametrize(
    "size", [40, 576, *(pytest.param(size, marks=pytest.mark.full) for size in (6, 64, 192, 1536, 2560))]
)
def test_transformed_rows_in_blocks_of_every_size(size: int, x_dtype: str) -> None:
    """Bytes may differ from XLA's by one where sums in another order are rounded."""
    x, weight = arrays(5, size, 8, x_dtype, "w8a8")
    assert weight.hadamard == block_of(size) > 1
    got, want = (in_form(form, x, weight, "float32") for form in ("kernel", "xla"))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * np.abs(want).max())


def test_the_transform_spreads_outliers() -> None:
    x, weight = (normal((16, 512), n) for n in range(2))
    x = x.at[:, 7].mul(50)

    def error(hadamard: int) -> float:
        got = product(x, quantize(weight, "int8", inputs=True, hadamard=hadamard))
        return float(jnp.abs(got - x @ weight.T).mean())

    assert error(512) < error(1) / 4


@pytest.mark.parametrize("size", [1, 10, 64, 96, 576, 1536])
def test_the_transform_is_orthogonal(size: int) -> None:
    """It also spreads a number over its block, evenly except for sizes with a factor of three."""
    block = block_of(size)
    made = np.asarray(transform(jnp.eye(size), block), np.float64)
    np.testing.assert_allclose(made @ made.T, gain(block) * np.eye(size), atol=1e-4 * gain(block))
    assert np.abs(made).max() == pytest.approx({1: 1, 3: 2 / 3, 9: 4 / 9}[block // gain(block)], rel=1e-5)


@pytest.mark.parametrize("kind", [*WEIGHTS, "w8a8"])
def test_a_row_is_the_same_alone_and_among_others(kind: str) -> None:
    x, weight = arrays(31, 200, 37, "bfloat16", kind)
    every = in_form("kernel", x, weight, "float32")
    for first, end in ((0, 1), (3, 5), (7, 15), (2, 31)):
        np.testing.assert_array_equal(in_form("kernel", x[first:end], weight, "float32"), every[first:end])


@pytest.mark.parametrize("kind", [*INPUTS, "int8", "w8a8"])
def test_rows_that_are_multiplied_in_chunks(kind: str) -> None:
    """Longer than a chunk: few rows, those of several groups, and a single one have the same bits."""
    size = 2 * CHUNK // SIZES[kind if kind in INPUTS else "int8"] + 37
    x, weight = arrays(ROWS + 5, size, 70, "bfloat16", kind)
    every = in_form("kernel", x, weight, "float32")
    want = exact(x, weight)
    assert (np.abs(every - want) <= 4e-6 * np.abs(want).max()).all()
    for first, end in ((0, 1), (1, 9), (2, 66)):
        np.testing.assert_array_equal(in_form("kernel", x[first:end], weight, "float32"), every[first:end])


def test_large_sums_of_bytes_are_exact() -> None:
    x, weight = jnp.ones((3, 5000)), Quantized(jnp.full((5, 5000), -127, jnp.int8), jnp.ones(5), inputs=True)
    scale = np.float32(1) * np.float32(1 / 127)
    np.testing.assert_array_equal(
        in_form("kernel", x, weight, "float32"), np.float32(-127 * 127 * 5000) * scale
    )


@pytest.mark.parametrize("dtype", INPUTS)
def test_every_number_of_e4m3(dtype: str) -> None:
    bits = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])  # NaN
    values = jax.lax.bitcast_convert_type(jnp.asarray(bits)[:, None], jnp.float8_e4m3fn)
    weight = Quantized(values, jnp.ones(254), kind="float8_e4m3fn")
    for rows in (1, 9):
        got = in_form("kernel", jnp.ones((rows, 1), dtype), weight, "float32")
        np.testing.assert_array_equal(got, np.tile(np.asarray(values.astype(jnp.float32))[:, 0], (rows, 1)))


@pytest.mark.parametrize("dtype", INPUTS)
def test_results_are_rounded_to_nearest_even(dtype: str) -> None:
    """Ties, the largest numbers, infinities and NaN."""
    numbers = jnp.array(
        [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 3.3961e38, -jnp.inf, jnp.nan, -0.0],
        jnp.float32,
    )
    got = in_form("kernel", jnp.ones((1, 1)), numbers[:, None], dtype)
    np.testing.assert_array_equal(got[0], np.asarray(numbers.astype(dtype), np.float64))


def test_rows_share_a_form_by_class() -> None:
    assert form_key(2, "bfloat16", "w8a8") == form_key(16, "bfloat16", "w8a8") == "bfloat16 * w8a8, 16 rows"
    assert (
        len({form_key(rows, "float32", "float32") for rows in range(1, 2 * ROW_CLASSES[-1])})
        == len(ROW_CLASSES) + 1
    )


def test_other_dtypes_and_devices_are_left_to_xla() -> None:
    half, single = jnp.ones((2, 8), jnp.float16), jnp.ones((2, 8))
    assert has_kernel(jax.jit(product).lower(single, single)) and not has_kernel(
        jax.jit(product).lower(half, half)
    )
    traced = jax.jit(product).trace(*arrays(4, 96, 64, "float32", "w8a8"))
    assert has_kernel(traced.lower()) and not has_kernel(traced.lower(lowering_platforms=("cuda",)))


SAVED = """
import json, pickle, sys
import jax, jax.numpy as jnp
from jax.experimental import serialize_executable
from pallas_kernels.products.weights import prepare, product
x, w = jnp.arange(8.0)[None], jnp.ones((4, 8))
if sys.argv[1] == "save":
    program = jax.jit(product).lower(x, w).compile()
    open(sys.argv[2], "wb").write(pickle.dumps(serialize_executable.serialize(program)))
else:
    prepare(w)
    program = serialize_executable.deserialize_and_load(*pickle.loads(open(sys.argv[2], "rb").read()))
    print(json.dumps(program(x, w).tolist()))
"""


def test_a_saved_program_finds_its_kernels(tmp_path: Path) -> None:
    for what in ("save", "load"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", SAVED, what, str(tmp_path / "program")],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[28.0] * 4]


def test_without_llvmlite_xla_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = quantize(jnp.ones((4, 8)), "int8")
    weights = dequantize(weight), weight
    assert all(has_kernel(jax.jit(product).lower(jnp.ones((1, 8)), one)) for one in weights)
    monkeypatch.setattr("pallas_kernels.devices.cpu_refused", lambda: "llvmlite is not installed")
    jax.clear_caches()  # of what was traced
    assert not any(has_kernel(jax.jit(product).lower(jnp.ones((1, 8)), one)) for one in weights)
    monkeypatch.setitem(sys.modules, "pallas_kernels.products.cpu", None)  # an import of it fails
    prepare(weight)
    devices = np.array(jax.devices())
    stacks = [SimpleNamespace(a=weights[0])]
    loras.prepare(SimpleNamespace(mesh=SimpleNamespace(devices=devices), stacks=stacks))  # type: ignore[arg-type]
