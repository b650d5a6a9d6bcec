"""The gated delta rule and linear attention against their definitions in float64: token by token, and in
chunks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import delta_rule

HEADS, KEY, VALUE = 3, 16, 8


def definition(
    state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, rate: np.ndarray
) -> np.ndarray:
    """[heads, key, value] and tokens [heads, tokens, ...] -> [heads, tokens + 1, key, value] after none, one,
    ... tokens.
    """
    states = [state]
    for t in range(decay.shape[1]):
        old = states[-1] * np.exp(decay[:, t])[:, None, None]
        missing = v[:, t] - np.einsum("hkv,hk->hv", old, k[:, t])
        states.append(old + rate[:, t][:, None, None] * k[:, t][:, :, None] * missing[:, None, :])
    return np.stack(states, 1)


def tokens(count: int, kind: str) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    q, k, v = (rng.normal(size=(HEADS, count, size)) for size in (KEY, KEY, VALUE))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay, rate = -0.3 * np.abs(rng.normal(size=(HEADS, count))), rng.uniform(size=(HEADS, count))
    if kind == "the same key again and again":  # where powers of the system's matrix would grow without bound
        k[:], decay[:], rate[:] = k[:, :1], 0, 0.99
    if kind == "strong decay":
        decay *= 100
    return [q, k, v, decay, rate]


@pytest.mark.parametrize("kind", ["random", "the same key again and again", "strong decay"])
@pytest.mark.parametrize("count", [1, 7, 64])
def test_a_chunk_is_as_many_steps(count: int, kind: str) -> None:
    state = np.random.default_rng(0).normal(size=(HEADS, KEY, VALUE))
    given = tokens(count, kind)
    wanted = definition(state, *given)
    read = np.einsum("htkv,htk->htv", wanted[:, 1:], given[0])
    q, k, v, decay, rate = (jnp.asarray(x, jnp.float32) for x in given)
    after, out = delta_rule.advance(jnp.asarray(state, jnp.float32), delta_rule.prepare(q, k, v, decay, rate))
    assert np.abs(after - wanted[:, -1]).max() < 1e-5 and np.abs(out - read).max() < 1e-5
    one = jnp.asarray(state, jnp.float32)
    for t in range(min(count, 7)):
        one, out = delta_rule.step(one, q[:, t], k[:, t], v[:, t], decay[:, t], rate[:, t])
        assert np.abs(one - wanted[:, t + 1]).max() < 1e-5 and np.abs(out - read[:, t]).max() < 1e-5


@pytest.mark.parametrize("count", [1, 64])
def test_linear_attention_adds_values_as_they_are(count: int) -> None:
    q, k, v, decay, _ = tokens(count, "random")
    state = np.random.default_rng(0).normal(size=(HEADS, KEY, VALUE))
    states = [state]
    for t in range(count):
        states.append(
            states[-1] * np.exp(decay[:, t])[:, None, None] + k[:, t][:, :, None] * v[:, t][:, None, :]
        )
    read = np.einsum("thkv,htk->htv", np.stack(states[1:]), q)
    given = [jnp.asarray(x, jnp.float32) for x in (q, k, v, decay)]
    after, out = delta_rule.advance(jnp.asarray(state, jnp.float32), delta_rule.prepare(*given))
    assert np.abs(after - states[-1]).max() < 1e-5 and np.abs(out - read).max() < 1e-5
    one, out = delta_rule.step(jnp.asarray(state, jnp.float32), *(x[:, 0] for x in given))
    assert np.abs(one - states[1]).max() < 1e-5 and np.abs(out - read[:, 0]).max() < 1e-5


def test_a_saved_program_needs_no_library() -> None:
    """LAPACK's functions are found only in a process that has lowered a call of them."""
    given = [jnp.asarray(x, jnp.float32) for x in tokens(64, "random")]
    assert "custom_call" not in jax.jit(delta_rule.prepare).lower(*given).as_text()


def test_chunks_divide_a_tile() -> None:
    assert [delta_rule.chunk_size(tokens) for tokens in (1, 8, 16, 64, 96, 128, 67, 130)] == [
        1,
        8,
        16,
        64,
        48,
        64,
        67,
        26,
    ]
