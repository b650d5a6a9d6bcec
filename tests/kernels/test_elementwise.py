"""Rotary embedding, gates and norms on a CPU: the kernels against exact values, on shapes that no vector
divides.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels.cache import dispatch as cache_dispatch
from pallas_kernels.cache.qkv import QkvProduct
from pallas_kernels.elementwise import activations, rotary
from pallas_kernels.elementwise import cpu as elementwise
from pallas_kernels.elementwise.activations import gated
from pallas_kernels.elementwise.norm import rms_norm
from pallas_kernels.llvm import calls, native
from tests.kernels.interpreted import normal
from tests.kernels.test_masked import SETS, X86, runs_here

DTYPES = "bfloat16", "float32"
few = settings(max_examples=3, deadline=None, phases=[Phase.generate])  # each is compiled
SHARED_ROWS = 90  # enough that threads share the work


def close(got: jax.Array, exact: np.ndarray[Any, Any]) -> None:
    """Equal to within half of bfloat16's last bit, or about float32's rounding."""
    error = {"bfloat16": 2.0**-8, "float32": 1e-6}[str(got.dtype)]
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=error * 1.01, atol=1e-6)


def rotation(tokens: int, pairs: int) -> tuple[jax.Array, jax.Array]:
    angles = np.random.default_rng(pairs).uniform(0, 7, (tokens, pairs)).astype(np.float32)
    return jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> np.ndarray[Any, Any]:
    """The rotation as a product of complex numbers, in float64."""
    wide, pairs = np.array(x, np.float64), cos.shape[1]
    turn = (np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64))[:, None]
    turned = (wide[..., :pairs] + 1j * wide[..., pairs : 2 * pairs]) * turn
    return np.concatenate([turned.real, turned.imag, wide[..., 2 * pairs :]], axis=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@few
@given(
    st.one_of(st.integers(1, 5), st.just(SHARED_ROWS)),
    st.integers(1, 4),
    st.integers(16, 70),
    st.one_of(st.just(0), st.integers(16, 50)),
)
def test_rotation(dtype: str, tokens: int, heads: int, pairs: int, rest: int) -> None:
    x = normal((tokens, heads, 2 * pairs + rest), tokens, dtype)
    cos, sin = rotation(tokens, pairs)
    got = jax.jit(elementwise.rotate)(x, cos, sin)
    wide = np.asarray(x, np.float64)
    np.testing.assert_array_equal(np.asarray(got)[..., 2 * pairs :], np.asarray(x)[..., 2 * pairs :])
    bound = np.abs(wide).max()  # of a sum whose terms cancel, the error is that of the terms
    error = {"bfloat16": 2.0**-8, "float32": 1e-6}[dtype]
    np.testing.assert_allclose(
        np.asarray(got, np.float64), rotated(x, cos, sin), rtol=error, atol=1e-6 * bound
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_of_a_product(dtype: str) -> None:
    """Queries and keys are read in place; rows behind them are skipped. The bits are those of `rotate`."""
    for tokens, kv_heads, group, others, dim, pairs in (5, 2, 3, 1, 80, 24), (SHARED_ROWS, 1, 2, 2, 32, 16):
        rows = normal((tokens, kv_heads, group + 1 + others, dim), tokens, dtype)
        angles, want = rotation(tokens, pairs), QkvProduct(rows, group).split()
        q, k = elementwise.rotate_qkv(rows, group, *angles)
        np.testing.assert_array_equal(q, elementwise.rotate(want.q, *angles))
        np.testing.assert_array_equal(k, elementwise.rotate(want.k, *angles))


def test_the_cache_gets_the_keys_of_a_product() -> None:
    rows, angles = normal((3, 2, 4, 32), 0), rotation(3, 16)
    pages, where = jnp.zeros((4, 2, 4, 32)), (jnp.arange(1, 4), jnp.arange(3))
    write = jax.jit(
        lambda rows: cache_dispatch.kv_write(
            pages, pages, QkvProduct(rows, 2), *where, rows=2, rotation=angles
        )
    ).lower(rows)
    assert "jengine_rotate_qkv" in write.as_text()
    (decoding, prompts), (keys, values) = write.compile()(rows)
    q, k, v = QkvProduct(rows, 2).split()
    np.testing.assert_array_equal(np.concatenate([decoding, prompts]), elementwise.rotate(q, *angles))
    for row in range(3):
        np.testing.assert_array_equal(keys[row + 1, :, row], elementwise.rotate(k, *angles)[row])
        np.testing.assert_array_equal(values[row + 1, :, row], v[row])


def test_rotations_that_no_kernel_takes_are_xla_s() -> None:
    for dtype, dim, pairs in ("float16", 64, 32), ("float32", 16, 8), ("float32", 40, 16):
        assert not elementwise.rotates(dtype, dim, pairs)
        x, angles = normal((3, 2, dim), 0, dtype), rotation(3, pairs)
        np.testing.assert_array_equal(rotary.rotate(x, angles), rotary.rotate_by_xla(x, angles))
    assert elementwise.rotates("bfloat16", 64, 32)


def activated(activation: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_new"])
@few
@given(st.one_of(st.integers(1, 5), st.just(SHARED_ROWS)), st.integers(16, 130))
def test_gates(dtype: str, activation: str, rows: int, size: int) -> None:
    gate_up = (8 * normal((rows, size, 2), size)).astype(dtype)
    wide = np.asarray(gate_up, np.float64)
    close(
        jax.jit(gated, static_argnums=1)(gate_up, activation),
        activated(activation, wide[..., 0]) * wide[..., 1],
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_new"])
def test_gates_of_extreme_numbers(activation: str) -> None:
    gates = jnp.array([0.0, -0.0, 1e30, -1e4, jnp.inf, 88.0, -88.0, -200.0, 1e-30, *[1.0] * 7])
    got = np.asarray(gated(jnp.stack([gates, jnp.ones(16)], axis=-1)[None], activation))[0]
    np.testing.assert_allclose(got[:9], [0, 0, 1e30, 0, np.inf, 88, 0, 0, 5e-31], rtol=1e-6, atol=1e-30)
    assert np.isnan(gated(jnp.full((1, 16, 2), jnp.nan), activation)).all()


def test_gates_that_no_kernel_takes_are_xla_s() -> None:
    for dtype, size, activation in (
        ("float16", 64, "silu"),
        ("float32", 3, "silu"),
        ("float32", 64, "relu"),
        ("float32", 64, "gelu"),
    ):
        gate_up = normal((2, size, 2), 0, dtype)
        wide = gate_up.astype(jnp.float32)
        want = (activations.ACTIVATIONS[activation](wide[..., 0]) * wide[..., 1]).astype(dtype)
        np.testing.assert_allclose(
            gated(gate_up, activation), want, rtol=2e-3 if dtype == "float16" else 1e-6
        )


def normed(x: Any, weight: Any, eps: float, offset: float) -> np.ndarray[Any, Any]:
    wide = np.asarray(x, np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * (np.asarray(weight, np.float64) + offset)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES)
@few
@given(st.one_of(st.integers(1, 5), st.just(SHARED_ROWS)), st.integers(16, 400), st.sampled_from([0.0, 1.0]))
def test_norms(dtype: str, rows: int, size: int, offset: float) -> None:
    x = (3 * normal((rows, 2, size), size)).astype(dtype)
    weight = jnp.asarray(np.random.default_rng(1).uniform(size=size).astype(dtype))
    got = jax.jit(rms_norm, static_argnums=(2, 3))(x, weight, 0.5, offset)
    close(got, normed(x, weight, 0.5, offset))
    # a row's bits do not depend on others
    np.testing.assert_array_equal(got[:1], elementwise.rms_norm(x[:1], weight, 0.5, offset))


def test_norms_that_no_kernel_takes_are_xla_s() -> None:
    for dtype, other, size in (
        ("float16", "float16", 64),
        ("bfloat16", "float32", 64),
        ("float32", "float32", 8),
    ):
        x, weight = normal((2, size), 0, dtype), jnp.full(size, 2.0, other)
        assert not elementwise.norms(x, weight)
        np.testing.assert_allclose(
            np.asarray(rms_norm(x, weight, 0.1), np.float64), normed(x, weight, 0.1, 0.0), rtol=1e-2
        )
    assert (
        "jengine_norm"
        in jax.jit(rms_norm, static_argnums=2).lower(jnp.ones((2, 16)), jnp.ones(16), 0.1).as_text()
    )


@pytest.mark.parametrize("name", [name for name, (triple, *_) in SETS.items() if triple == X86])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_without_features(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = native.Target(X86, features=SETS[name][1])
    if not runs_here(target):
        pytest.skip(f"this processor lacks {name}")
    monkeypatch.setattr(native, "host", lambda: target)
    monkeypatch.setattr(elementwise, "register", lambda known, make: calls.register(f"{known}_{name}", make))
    x, angles = normal((5, 3, 80), 1, dtype), rotation(5, 24)
    np.testing.assert_allclose(
        np.asarray(elementwise.rotate(x, *angles), np.float64), rotated(x, *angles), rtol=2.0**-8, atol=1e-5
    )
    gate_up = normal((3, 21, 2), 2, dtype)
    wide = np.asarray(gate_up, np.float64)
    for activation in "silu", "gelu_tanh":
        close(elementwise.gated(gate_up, activation), activated(activation, wide[..., 0]) * wide[..., 1])
    x, weight = normal((3, 37), 3, dtype), jnp.linspace(0.5, 2.0, 37, dtype=dtype)
    close(elementwise.rms_norm(x, weight, 0.1, 1.0), normed(x, weight, 0.1, 1.0))


@pytest.mark.parametrize("name", SETS)
def test_no_instruction_is_compiled_that_a_processor_lacks(name: str) -> None:
    triple, features, *_, lacking = SETS[name]
    target = native.Target(triple, features=features)
    for what in "rotate", "rotate_qkv", "silu", "norm":
        text = native.assembly(elementwise.source(target, what, "bfloat16"), target)
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith((".", "#", "//")))
        assert "compute" in text and not re.search(lacking, code)
