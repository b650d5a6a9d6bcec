"""Products by panels of packed weights: exact for every shape, however many threads share them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels import products as forms
from pallas_kernels.cpu import calls, choice, native, panels, products, team
from pallas_kernels.cpu.formats import processor
from pallas_kernels.cpu.kinds import INPUTS
from pallas_kernels.weights import stored
from tests.kernels.interpreted import normal

REFUSED = panels.why_no_panels("bfloat16", "bfloat16", panels.OUTS, panels.STEP)
pytestmark = pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED))
few = settings(max_examples=6, deadline=None, phases=[Phase.generate])  # each is compiled
rows, chunks, outs = st.integers(1, 2 * panels.ROWS + 9), st.integers(1, 60), st.integers(panels.OUTS, 300)


def multiplied(x: jax.Array, weight: jax.Array, dtype: Any, name: str) -> np.ndarray[Any, Any]:
    """In this form."""
    key = forms.form_key(len(x), "bfloat16", "bfloat16")
    given = stored(weight).with_forms(((key, "panels"),))
    lowered = jax.jit(lambda x, weight: weight.product(x, dtype)).lower(x, given)
    assert name in lowered.as_text()
    got = lowered.compile()(x, given)
    assert got.dtype == dtype
    return np.asarray(got, np.float64)


def arrays(rows: int, size: int, outs: int) -> tuple[jax.Array, jax.Array]:
    return normal((rows, size), rows, "bfloat16"), normal((outs, size), outs, "bfloat16")


def exact(x: jax.Array, weight: jax.Array) -> np.ndarray[Any, Any]:
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


def assert_close(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], dtype: Any) -> None:
    rounding = 2.0**-8 if dtype == "bfloat16" else 0
    assert (np.abs(got - want) <= rounding * np.abs(want) + 2e-6 * np.abs(want).max()).all()


@few
@given(rows=rows, chunks=chunks, outs=outs, dtype=st.sampled_from(INPUTS))
def test_the_product(rows: int, chunks: int, outs: int, dtype: str) -> None:
    x, weight = arrays(rows, chunks * panels.STEP, outs)
    assert_close(multiplied(x, weight, dtype, "jengine_panels"), exact(x, weight), dtype)


@pytest.mark.parametrize("rows", [5, panels.LEAST, panels.LEAST + 7, 4 * panels.LEAST + 1, panels.ROWS + 1])
def test_many_threads_divide_the_rows_too(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parts as for 64 threads."""
    monkeypatch.setattr(team, "parts", lambda: 64 * team.PARTS)
    code = native.compiled(lambda: panels.panels_module(native.host()), "multiply", "parts")
    name = calls.register("panels_of_many_threads", lambda: [(code[0], code[1])])
    monkeypatch.setattr(products, "register_panels", lambda: name)
    x, weight = arrays(rows, panels.DEPTH + panels.STEP, 3 * panels.OUTS - 1)
    assert_close(multiplied(x, weight, "float32", name), exact(x, weight), "float32")


@pytest.mark.parametrize("size, outs", [(panels.STEP + 2, panels.OUTS), (panels.STEP, panels.OUTS - 1)])
def test_other_sizes_take_the_other_kernel(size: int, outs: int) -> None:
    x, weight = arrays(70, size, outs)
    assert_close(multiplied(x, weight, "float32", "jengine_product"), exact(x, weight), "float32")


def test_a_row_is_the_same_among_any_others() -> None:
    x, weight = arrays(200, 96, 70)
    every = multiplied(x, weight, "float32", "jengine_panels")
    for first, end in ((0, 1), (3, 9), (7, 200)):
        np.testing.assert_array_equal(
            multiplied(x[first:end], weight, "float32", "jengine_panels"), every[first:end]
        )


def test_prompts_take_panels_unless_all_rows_must_be_summed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    at = processor(native.host())
    assert choice.candidates(at, "bfloat16", "bfloat16", 256)[0] == "panels"
    assert "panels" not in choice.candidates(at, "bfloat16", "bfloat16", 64)
    assert "panels" not in choice.candidates(at, "bfloat16", "w8a8", 256)
    monkeypatch.setattr(choice, "_fastest", lambda able, *_: able[0])
    key = "bfloat16 * bfloat16, more rows"
    assert choice.forms("bfloat16", ["bfloat16"], (64, 32), {})[key] == "panels"
    for known in ({}, {key: "panels"}):
        assert choice.forms("bfloat16", ["bfloat16"], (64, 32), known, by_place=False)[key] != "panels"
