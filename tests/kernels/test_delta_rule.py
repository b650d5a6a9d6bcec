"""The gated delta rule and linear attention against their definitions in float64: token by token, and in
chunks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrence import delta_rule

HEADS, KEY, VALUE = 3, 16, 8
# Outside of jit, each of their operations would be compiled for each shape.
step, steps = jax.jit(delta_rule.step), jax.jit(delta_rule.steps)


@jax.jit
def advance(state: jax.Array, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The state [heads, key, value] after a chunk of tokens [heads, tokens, ...], and what these read."""
    return delta_rule.advance(state, delta_rule.prepare(*given))


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
    after, out = advance(jnp.asarray(state, jnp.float32), q, k, v, decay, rate)
    assert np.abs(after - wanted[:, -1]).max() < 1e-5 and np.abs(out - read).max() < 1e-5
    one = jnp.asarray(state, jnp.float32)
    for t in range(min(count, 7)):
        one, out = step(one, q[:, t], k[:, t], v[:, t], decay[:, t], rate[:, t])
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
    after, out = advance(jnp.asarray(state, jnp.float32), *given)
    assert np.abs(after - states[-1]).max() < 1e-5 and np.abs(out - read).max() < 1e-5
    one, out = step(jnp.asarray(state, jnp.float32), *(x[:, 0] for x in given))
    assert np.abs(one - states[1]).max() < 1e-5 and np.abs(out - read[:, 0]).max() < 1e-5


@pytest.mark.parametrize("rated", [True, False])
@pytest.mark.parametrize("at_once", [12, 4])
def test_tokens_of_several_sequences_side_by_side_are_as_many_steps(at_once: int, rated: bool) -> None:
    """In parts of `at_once` tokens; what another sequence holds does not matter, even if it is not finite."""
    lengths, rng = [1, 4, 1, 3, 3], np.random.default_rng(0)
    behind = jnp.asarray([at for length in lengths for at in range(length)])
    given = [jnp.asarray(np.moveaxis(x, 1, 0), jnp.float32) for x in tokens(12, "random")]
    given[2] = given[2].at[0].set(jnp.nan)
    given = given if rated else given[:4]
    begun = jnp.asarray(rng.normal(size=(5, HEADS, KEY, VALUE)), jnp.float32)
    state = jnp.repeat(begun, jnp.asarray(lengths), axis=0)
    states, out, earlier = [], [], delta_rule.Earlier.none(3, *given[1:3])
    for at in range(0, 12, at_once):
        q, k, v, decay, *rates = (x[at : at + at_once] for x in given)
        rate, after = rates[0] if rates else None, behind[at : at + at_once]
        *part, earlier = steps(state[at : at + at_once], q, k, v, decay, rate, after, earlier)
        states.append(part[0])
        out.append(part[1])
    for t in range(1, 12):
        before = wanted if behind[t] else state[t]  # noqa: F821
        wanted, read = step(before, *(x[t] for x in given))
        assert np.abs(np.concatenate(states)[t] - wanted).max() < 1e-5
        assert np.abs(np.concatenate(out)[t] - read).max() < 1e-5


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
