"""Pipelines on a virtual clock."""

from __future__ import annotations

import pytest

from benchmarks.pipeline import GOAL, simulate


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_are_busy_at_full_load(stages: int) -> None:
    """With as many sequences for each stage, in steps with prompts and without."""
    found = simulate(stages, requests=150 * stages, max_num_seqs=32 * stages)
    assert found["busy"] >= GOAL
    # a step passes through all stages
    assert found["seconds_between_tokens"] >= 8e-3 * stages


def test_one_stage_waits_for_nothing() -> None:
    assert simulate(1, requests=60, max_num_seqs=16)["busy"] > 0.999
