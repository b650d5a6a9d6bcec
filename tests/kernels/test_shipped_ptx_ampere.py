"""The kernel for Ampere and Ada as it ships: its PTX, executed on a CPU.

In a process of its own, since one compiles for one compute capability.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.compiling import quickly_compiled
from tests.extras import compiler_for_gpus
from tests.kernels.executed import Executed
from tests.kernels.shipped import AMPERE, MORE_AMPERE, Check, parameters

compiler_for_gpus()


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def least_covered(check: Check, schedules: Any, target: str) -> float:
    executed = Executed(schedules, target)
    with quickly_compiled():
        check(runner=executed.runner)
    return executed.least_covered()


@pytest.mark.parametrize(
    ("check", "schedules", "covered"), parameters("paged_attention", few=AMPERE, more=MORE_AMPERE)
)
def test_the_reference_is_met(
    check: Check, schedules: Any, covered: float, process: ProcessPoolExecutor
) -> None:
    assert process.submit(least_covered, check, schedules, "a100").result() >= covered
