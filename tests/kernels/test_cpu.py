"""A CPU's kernels, compiled by Numba and called by XLA, against the float32 reference."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import products, reference
from pallas_kernels.cpu import calls, team
from pallas_kernels.cpu.attention import paged_attention_decode
from pallas_kernels.cpu.math import exponentials
from pallas_kernels.cpu.products import kernel_of, matrix_few, matrix_vector
from pallas_kernels.quantized import dequantize, quantize
from tests.kernels.interpreted import cache, only_what_is_seen
from tests.kernels.test_attention_decode import BOTH, CAP, PLAIN, WINDOW, Ways, eight_bits

ROOT = Path(__file__).parents[2]


# head_dim, kv_heads, group, page_size, dtype, kind, ways
CASES = [
    (64, 4, 3, 16, "bfloat16", None, PLAIN),
    pytest.param(64, 1, 1, 64, "float32", None, WINDOW, marks=pytest.mark.full),
    (128, 2, 4, 16, "bfloat16", None, BOTH),
    (24, 3, 2, 4, "float32", None, BOTH),
    pytest.param(80, 5, 1, 8, "bfloat16", None, CAP, marks=pytest.mark.full),
    pytest.param(256, 2, 1, 16, "bfloat16", None, WINDOW, marks=pytest.mark.full),
    (64, 2, 4, 16, "bfloat16", "int8", BOTH),
    pytest.param(24, 1, 8, 32, "float32", "int8", WINDOW, marks=pytest.mark.full),
    pytest.param(64, 4, 1, 32, "float32", "float8_e4m3fn", CAP, marks=pytest.mark.full),
    (24, 2, 3, 16, "bfloat16", "float8_e4m3fn", PLAIN),
]


@pytest.mark.parametrize(("head_dim", "kv_heads", "group", "page_size", "dtype", "kind", "ways"), CASES)
def test_the_reference_is_met(head_dim: int, kv_heads: int, group: int, page_size: int, dtype: str, kind: str | None, ways: Ways) -> None:
    """Numbers and scales of tokens that no query sees are NaN; those behind its window change no bit."""
    lengths = [1, page_size - 1, 0, page_size, page_size + 1, 320, 129]
    whole = cache(lengths, -(-320 // page_size), kv_heads, page_size, head_dim, dtype, seed=page_size)
    paged = only_what_is_seen(whole, np.array(lengths) - 1, lengths, ways.get("window"), behind=0)
    clean = paged.clean()
    if kind:
        (whole, _), (paged, clean) = eight_bits(whole, kind), eight_bits(paged, kind)
    q = jax.random.normal(jax.random.key(7), (len(lengths), kv_heads * group, head_dim)).astype(dtype)
    run = jax.jit(partial(paged_attention_decode, **ways))
    got = np.asarray(run(q, *paged), np.float32)
    np.testing.assert_array_equal(got, np.asarray(run(q, *whole), np.float32))
    want = np.asarray(reference.paged_attention_decode(q.astype(jnp.float32), *clean, **ways))
    rounding = float(jnp.finfo(dtype).eps) / 2 if dtype == "bfloat16" else 0
    assert (np.abs(got - want) <= 1.01 * rounding * np.abs(want) + 5e-6).all()  # false where got is NaN
    assert (got[2] == 0).all()


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("count", [1, 16, 64])
def test_work_is_split_without_loss(rows: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into fewer parts than there are items, into as many, into more."""
    monkeypatch.setattr(team, "parts", lambda: count)
    monkeypatch.setattr("pallas_kernels.cpu.attention.register", lambda name, make: calls.register(f"{name}_of_{count}", make))
    lengths = [(7 * n) % 50 for n in range(1, rows + 1)]
    paged = cache([9, *lengths], 4, 2, 16, 64, "float32", seed=rows)
    paged = paged._replace(tables=paged.tables[1:], lengths=paged.lengths[1:])
    q = jax.random.normal(jax.random.key(7), (rows, 6, 64))
    got = jax.jit(partial(paged_attention_decode, scale=0.2))(q, *paged)
    np.testing.assert_allclose(got, reference.paged_attention_decode(q, *paged.clean(), scale=0.2), atol=5e-6)


@pytest.mark.parametrize(
    ("weights", "inputs", "shape"),
    [
        *(
            (weights, inputs, (33, 768))
            for weights in ("bfloat16", "float32", "int8", "float8_e4m3fn")
            for inputs in ("bfloat16", "float32")
        ),
        *(("float32", "float32", shape) for shape in ((1, 8), (5, 7), (640, 100))),
    ],
)
def test_a_matrix_times_a_vector(weights: str, inputs: str, shape: tuple[int, int]) -> None:
    w = (jax.random.normal(jax.random.key(0), shape) * 9).astype(weights)
    x = jax.random.normal(jax.random.key(1), (1, shape[1])).astype(inputs)
    got = jax.jit(matrix_vector)(x, w)
    exact = np.asarray(x, np.float64) @ np.asarray(w.astype(jnp.float32), np.float64).T
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(8, 768, 36), (32, 32, 4), (4, 96, 400), (16, 2048, 8)])
def test_a_matrix_times_a_few_vectors(dtype: str, shape: tuple[int, int, int]) -> None:
    rows, size, outs = shape
    x, w = (jax.random.normal(jax.random.key(n), (n, size)).astype(dtype) for n in (rows, outs))
    if kernel_of(x, w) is not matrix_few:
        pytest.skip("this processor lacks the instructions")
    got = jax.jit(matrix_few)(x, w)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact, atol=1e-5 * np.abs(exact).max())
    assert "jengine_matrix_few" in jax.jit(products.product).lower(x, w).as_text()


def test_other_shapes_are_left_to_xla() -> None:
    def refused(rows: int, size: int, outs: int, dtype: str) -> bool:
        return kernel_of(jnp.ones((rows, size), dtype), jnp.ones((outs, size), dtype)) is None

    assert all(refused(*shape, "float32") for shape in ((3, 64, 64), (8, 60, 64), (8, 64, 66), (64, 64, 64)))
    assert refused(8, 64, 64, "float16") and refused(8, 48, 64, "bfloat16")
    many = jnp.ones((64, 64)), jnp.ones((64, 64))
    assert "jengine" not in jax.jit(products.product).lower(*many).as_text()


def test_sums_of_int8_are_exact() -> None:
    x, w = jnp.full((1, 5000), 127, jnp.int8), jnp.full((3, 5000), -127, jnp.int8)
    assert jax.jit(matrix_vector)(x, w).tolist() == [[-127 * 127 * 5000] * 3]


def test_every_number_of_e4m3() -> None:
    bits = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])  # NaN
    w = jax.lax.bitcast_convert_type(jnp.asarray(bits)[:, None], jnp.float8_e4m3fn)
    np.testing.assert_array_equal(jax.jit(matrix_vector)(jnp.ones((1, 1)), w)[0], np.asarray(w.astype(jnp.float32))[:, 0])


@pytest.mark.parametrize("quantization", [None, "int8", "w8a8", "fp8"])
def test_a_product_of_one_row_takes_the_kernel_and_is_that_of_several(quantization: str | None) -> None:
    x, w = jax.random.normal(jax.random.key(0), (8, 96)), jax.random.normal(jax.random.key(1), (64, 96))
    weight: Any = w
    if quantization:
        weight = quantize(w, "float8_e4m3fn" if quantization == "fp8" else "int8", inputs=quantization == "w8a8")
    one = jax.jit(products.product).lower(x[:1], weight).compile()
    np.testing.assert_allclose(one(x[:1], weight), jax.jit(products.product)(x, weight)[:1], atol=1e-4)
    assert "jengine_matrix_vector" in one.as_text()
    assert "jengine_matrix_vector" not in jax.jit(products.product).lower(x, weight).as_text()
    assert "jengine" not in jax.jit(products.product).trace(x[:1], weight).lower(lowering_platforms=("cuda",)).as_text()


def test_exponentials() -> None:
    x = np.concatenate([np.linspace(-87, 0, 100_001), [-1e30, -1e4, 0.0, 1.0, 60.0]]).astype(np.float32)
    got = x.copy()
    exponentials(got, np.float32(0))
    np.testing.assert_allclose(got, np.exp(x.astype(np.float64)), rtol=5e-6, atol=2e-38)


SAVED = """
import json, pickle, sys
import jax, jax.numpy as jnp
from jax.experimental import serialize_executable
from pallas_kernels import products
x, w = jnp.arange(8.0)[None], jnp.ones((4, 8))
if sys.argv[1] == "save":
    program = jax.jit(products.product).lower(x, w).compile()
    open(sys.argv[2], "wb").write(pickle.dumps(serialize_executable.serialize(program)))
else:
    products.prepare(w)
    program = serialize_executable.deserialize_and_load(*pickle.loads(open(sys.argv[2], "rb").read()))
    print(json.dumps(program(x, w).tolist()))
"""


def test_a_saved_program_finds_its_kernels(tmp_path: Path) -> None:
    for what in ("save", "load"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", SAVED, what, str(tmp_path / "program")], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[28.0] * 4]


def test_without_numba_xla_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_refused", lambda: "numba is not installed")
    weight = quantize(jnp.ones((4, 8)), "int8")
    assert "jengine" not in jax.jit(products.product).lower(jnp.ones((1, 8)), dequantize(weight)).as_text()
    assert "jengine" not in jax.jit(products.product).lower(jnp.ones((1, 8)), weight).as_text()
    products.prepare(weight)
