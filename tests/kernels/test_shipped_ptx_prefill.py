"""Prefill attention as it ships: its PTX, executed on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras import compiler_for_gpus
from tests.kernels.executed import Executed
from tests.kernels.shipped import Check, parameters

compiler_for_gpus()


@pytest.mark.parametrize(("check", "schedules", "covered"), parameters("paged_attention_prefill"))
def test_the_reference_is_met(check: Check, schedules: Any, covered: float) -> None:
    executed = Executed(schedules)
    check(runner=executed.runner)
    assert executed.least_covered() >= covered
