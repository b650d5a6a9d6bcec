"""How many tiles run is a matter of useful tokens a second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.program_table import ProgramTable, TrunkKey
from jengine.scheduling.costs import StepCosts

TABLE = ProgramTable(row_buckets=(8, 32), mixed_row_buckets=(8, 32), tile_buckets=(1, 2, 4, 8), tile_size=64)


@given(rows=st.integers(0, 32), pending=st.integers(1, 8), scale=st.lists(st.floats(0.01, 100.0), min_size=8, max_size=8))
def test_no_other_number_of_tiles_carries_more_tokens_a_second(rows, pending, scale):
    keys = [TrunkKey(r, t) for r in (8, 32) for t in TABLE.tile_buckets]
    costs = StepCosts(dict(zip(keys, scale, strict=True)))

    def rate(tiles):
        return (rows + tiles * 64) / costs.measured[TABLE.trunk(rows, tiles)]

    chosen = costs.best_tiles(TABLE, rows=rows, pending=pending, pages=0)
    assert 1 <= chosen <= pending
    assert rate(chosen) == pytest.approx(max(rate(tiles) for tiles in range(1, pending + 1)))


def test_costs_are_linear_in_padded_tokens_until_measured():
    costs = StepCosts()
    one, two, four = (costs.seconds(TABLE, TrunkKey(8, tiles)) for tiles in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - one))
    costs.measured[TrunkKey(8, 2)] = 5.0
    assert costs.seconds(TABLE, TrunkKey(8, 2)) == 5.0


def test_before_measurement_a_nearly_empty_bucket_is_not_worth_it():
    costs = StepCosts()
    assert costs.best_tiles(TABLE, rows=0, pending=5, pages=0) == 4
    assert costs.best_tiles(TABLE, rows=0, pending=8, pages=0) == 8


def test_of_equal_rates_the_larger_bucket_wins():
    costs = StepCosts({TrunkKey(8, 1): 1.0, TrunkKey(8, 2): 2.0, TrunkKey(8, 4): 5.0})
    assert costs.best_tiles(TABLE, rows=0, pending=4, pages=0) == 2
