"""Rows of recurrent layers: one after the other, or side by side, with several rows of a sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.execution import recurrence
from jengine.execution.recurrence import Recurrence
from jengine.table.program_table import TrunkKey

LENGTHS = (1, 4, 1, 3, 2)  # rows of each sequence; one row is padding
ROWS, PAGES, TAPS, HEADS, KEY_HEADS, DIM = 12, 24, 4, 4, 2, 8
CHANNELS = 20


def batch(lengths: tuple[int, ...]) -> Any:
    """Sequence s reads page s, and its last row writes it; rows before write pages of their own."""
    slots, states, spare = list[int](), list[tuple[int, int]](), iter(range(len(lengths) + 1, PAGES))
    for number, length in enumerate(lengths, 1):
        written = [*[next(spare) for _ in range(length - 1)], number]
        slots += [number] * length
        states += zip([number, *written], written, strict=False)
    padding = ROWS - len(slots)
    return SimpleNamespace(
        row_slots=jnp.asarray([*slots, *[0] * padding], jnp.int32),
        row_states=jnp.asarray([*states, *[(0, 0)] * padding], jnp.int32),
        tile_states=jnp.zeros((0, 2), jnp.int32),
        tile_positions=jnp.zeros(0, jnp.int32),
        tile_lengths=jnp.zeros(0, jnp.int32),
    )


def run(lengths: tuple[int, ...], rated: bool, **how: Any) -> list[np.ndarray]:
    """Outputs and pages of a convolution and a recurrence, of rows that hold tokens, and of real pages."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    def both(states: Any, *args: Any) -> tuple[jax.Array, ...]:
        before, matrices, x, weight, q, k, v, decay, rate = args
        one = Recurrence(states, SimpleNamespace(real=None), TrunkKey(ROWS, 0), **how)  # type: ignore[arg-type]
        convolved, before = one.convolve(x, weight, before)
        read, matrices = one.recur(q, k, v, decay, rate, matrices)
        return convolved, read, before, matrices

    q, k, v = (draw(ROWS, heads, DIM) for heads in (KEY_HEADS, KEY_HEADS, HEADS))
    decay, rate = -jnp.abs(draw(ROWS, HEADS)), jax.nn.sigmoid(draw(ROWS, HEADS)) if rated else None
    pages = draw(PAGES, TAPS - 1, CHANNELS), draw(PAGES, HEADS, DIM, DIM)
    tokens = draw(ROWS, CHANNELS), draw(CHANNELS, TAPS), q / 4, k / 4, v, decay, rate
    states = vars(batch(lengths))
    out = jax.jit(lambda states, *args: both(SimpleNamespace(**states), *args))(states, *pages, *tokens)
    count = sum(lengths)
    return [np.asarray(array)[part] for array, part in zip(out, [slice(count)] * 2 + [slice(1, None)] * 2)]  # noqa: B905


@pytest.mark.parametrize("rated", [True, False])
@pytest.mark.parametrize("rows_at_once", [ROWS, 3])
def test_side_by_side_as_one_after_the_other(
    rows_at_once: int, rated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences may span parts that are computed at once."""
    monkeypatch.setattr(recurrence, "ROWS_BYTES", 4 * HEADS * DIM * DIM * rows_at_once)
    expected = run(LENGTHS, rated, following=3, in_order=True)
    for one, other in zip(run(LENGTHS, rated, following=3, in_order=False), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_programs_without_drafts() -> None:
    lengths = (1,) * (ROWS - 2)
    expected = run(lengths, True, following=3, in_order=True)
    for one, other in zip(run(lengths, True, following=0, in_order=False), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_with_and_without_rows_before_it() -> None:
    """As long as rows are computed one after the other."""
    together, alone = (run(lengths, True, following=3, in_order=True) for lengths in ((4,), (1,)))
    for one, other in zip(together[:2], alone[:2], strict=True):
        assert (one[0] == other[0]).all()
