"""A CPU's kernels, compiled by Numba and called by XLA, against the float32 reference."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.cpu import calls, team
from pallas_kernels.cpu.attention import paged_attention_decode
from pallas_kernels.cpu.math import exponentials
from tests.kernels.interpreted import cache, only_what_is_seen
from tests.kernels.test_attention_decode import BOTH, CAP, PLAIN, WINDOW, Ways, eight_bits

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


def test_exponentials() -> None:
    x = np.concatenate([np.linspace(-87, 0, 100_001), [-1e30, -1e4, 0.0, 1.0, 60.0]]).astype(np.float32)
    got = x.copy()
    exponentials(got, np.float32(0))
    np.testing.assert_allclose(got, np.exp(x.astype(np.float64)), rtol=5e-6, atol=2e-38)
