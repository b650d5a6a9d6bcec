"""The kernels for Ampere as they ship to Ampere and, with copies by TMA, to Blackwell: their PTX, executed.

In processes of their own, since one compiles for one compute capability.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.extras import compiler_for_gpus
from tests.kernels.executed import Executed
from tests.kernels.shipped import AMPERE, MORE_AMPERE, Cases, Check, parameters

compiler_for_gpus()


def process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


@pytest.fixture(scope="module")
def ampere() -> Iterator[ProcessPoolExecutor]:
    with process() as pool:
        yield pool


@pytest.fixture(scope="module")
def blackwell() -> Iterator[ProcessPoolExecutor]:
    with process() as pool:
        yield pool


def least_covered(check: Check, schedules: Any, target: str) -> float:
    executed = Executed(schedules, target)
    check(runner=executed.runner)
    return executed.least_covered()


@pytest.mark.parametrize(("check", "schedules", "covered"), parameters(*AMPERE, few=AMPERE, more=MORE_AMPERE))
def test_the_reference_is_met(
    check: Check, schedules: Any, covered: float, ampere: ProcessPoolExecutor
) -> None:
    assert ampere.submit(least_covered, check, schedules, "a100").result() >= covered


ON_BLACKWELL: Cases = {kernel: dict([*cases.items()][:1]) for kernel, cases in AMPERE.items()}
MORE_ON_BLACKWELL: Cases = {kernel: dict([*cases.items()][1:]) for kernel, cases in AMPERE.items()}


@pytest.mark.parametrize(
    ("check", "schedules", "covered"),
    parameters(*AMPERE, few=ON_BLACKWELL, more=MORE_ON_BLACKWELL),
)
def test_the_reference_is_met_on_blackwell(
    check: Check, schedules: Any, covered: float, blackwell: ProcessPoolExecutor
) -> None:
    assert blackwell.submit(least_covered, check, schedules, "b200").result() >= covered


# formats that Hopper's kernels do not support
ON_HOPPER: Cases = {
    kernel: {name: partial(check, target="h200") for name, check in cases.items() if "NVFP4" in name}
    for kernel, cases in AMPERE.items()
}


@pytest.mark.parametrize(("check", "schedules", "covered"), parameters(*AMPERE, few=ON_HOPPER, more={}))
def test_the_reference_is_met_on_hopper(check: Check, schedules: Any, covered: float) -> None:
    with process() as pool:
        assert pool.submit(least_covered, check, schedules, "h200").result() >= covered
