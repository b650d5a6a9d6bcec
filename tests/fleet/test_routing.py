"""Which replica takes a prompt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jengine.fleet.members import FIRST_RATE, PrefixBlocks, Rate, block_names, first_token_seconds

TOKENS = st.lists(st.integers(0, 3), max_size=24)


@given(one=TOKENS, other=TOKENS, size=st.integers(1, 5))
def test_blocks_are_found_as_far_as_prompts_agree(one: list[int], other: list[int], size: int) -> None:
    blocks = PrefixBlocks()
    blocks.enter(block_names(one, size, None), 100)
    agreed = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    agreed = min(len(one), len(other)) if agreed is None else agreed
    assert blocks.hits(block_names(other, size, None)) == agreed // size
    assert blocks.hits(block_names(one, size, "another salt")) == 0


def test_the_least_recently_used_blocks_are_forgotten_ends_first() -> None:
    blocks, first, second = (
        PrefixBlocks(),
        block_names([*range(8)], 2, None),
        block_names([*range(9, 13)], 2, None),
    )
    blocks.enter(first, 5)
    blocks.enter(second, 5)
    assert blocks.hits(first) == 3 and blocks.hits(second) == 2
    blocks.enter(first[:1], 5)
    blocks.enter(block_names([20, 21, 22, 23, 24, 25], 2, None), 5)
    assert blocks.hits(first) == 1 and blocks.hits(second) == 1


def test_the_first_token_is_predicted_from_what_waits_and_what_is_new() -> None:
    assert first_token_seconds(0.5, 100, 10, 1e-3) == 0.51
    assert first_token_seconds(0.01, 100, 10, 1e-3) == 0.11
    assert first_token_seconds(None, 0, 0, 1e-3) == 0
    rate = Rate()
    rate.learn(63, 5.0)
    assert rate.seconds == FIRST_RATE
    for _ in range(100):
        rate.learn(100, 0.3)
    assert abs(rate.seconds - 0.003) < 1e-6
