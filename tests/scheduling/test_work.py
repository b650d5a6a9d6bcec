"""Work in closed form equals counting token by token; plans contain it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jengine.scheduling.step_plan import FURTHER, Work, further_work, pairs, rows_work
from tests.scheduling.strict_device import Loop

WINDOWS = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=4)


def seen(position: int, window: int | None) -> int:
    """Number of tokens that a query attends to."""
    return position + 1 if window is None else min(position + 1, window)


@given(positions=st.lists(st.integers(0, 80), max_size=9), windows=WINDOWS)
def test_rows_attend_to_what_they_see(positions, windows):
    context = sum(seen(position, window) for window in windows for position in positions)
    longest = sum(max((seen(position, window) for position in positions), default=0) for window in windows)
    assert rows_work(positions, windows) == Work(context // len(windows), longest // len(windows))


@given(first=st.integers(0, 80), count=st.integers(0, 9), windows=WINDOWS)
def test_further_rows_cost_a_share(first, count, windows):
    work = rows_work(range(first, first + count), windows)
    assert further_work(first, count, windows) == Work(round(FURTHER * work.context), work.longest)


@given(start=st.integers(0, 80), length=st.integers(0, 80), windows=WINDOWS)
def test_prompts_attend_to_what_each_token_sees(start, length, windows):
    each = sum(seen(start + i, window) for window in windows for i in range(length))
    assert pairs(start, length, windows) == each // len(windows)


def test_a_plan_says_its_work():
    """A prompt of 20 tokens in tiles of 16, with a row that has 4 tokens, and a window of 8."""
    loop = Loop(
        max_model_len=64,
        tile_size=16,
        page_size=4,
        num_pages=100,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        windows=[None, 8],
    )
    works = []
    for prompt in [1] * 3, [2] * 20:
        loop.add(prompt, max_tokens=9, ignore_eos=True)
        for _ in range(2):
            loop.step(ahead=1)
            works.append(loop.dispatched[-1][0].work)
    windowed = pairs(0, 16, (8,)), pairs(16, 4, (8,))
    assert works == [
        Work(0, 0, 6),
        Work(4, 4, 0),
        Work(5, 5, (136 + windowed[0]) // 2),
        Work(6, 6, (4 * 16 + 10 + windowed[1]) // 2),
    ]
