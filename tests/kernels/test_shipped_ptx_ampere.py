"""The PTX of the kernels for Ampere, as they ship to Ampere and, with copies by TMA, to Blackwell, and of
those for Blackwell, executed.

In processes of their own, since one compiles for one compute capability.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import jax
import pytest

from benchmarks.machine import RESULTS
from tests.extras import compiler_for_gpus
from tests.kernels.executed import FEW, Executed
from tests.kernels.shipped import AMPERE, BLACKWELL, MORE_AMPERE, MORE_BLACKWELL, Cases, Check, parameters

compiler_for_gpus()

RECORD = json.loads((RESULTS / "executed_kernels.json").read_text())
COPY, FULL = ("copy_pages", "int8"), ("a100", "rtx3090", "b200", "rtx5090")


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


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic infers no layouts for it")
@pytest.mark.parametrize(
    ("check", "schedules", "covered"), parameters(*BLACKWELL, few=BLACKWELL, more=MORE_BLACKWELL)
)
def test_the_reference_is_met_by_kernels_for_blackwell(
    check: Check, schedules: Any, covered: float, blackwell: ProcessPoolExecutor
) -> None:
    assert blackwell.submit(least_covered, check, schedules, "b200").result() >= covered


def digest(target: str) -> str:
    from benchmarks.executed_kernels import digest  # which configures JAX

    return digest(Executed(FEW, target).compiled(AMPERE["copy_pages"]["int8"]))


@pytest.mark.parametrize("target", ["l4", *(pytest.param(one, marks=pytest.mark.full) for one in FULL)])
def test_cards_have_the_ptx_of_the_record(target: str) -> None:
    """Where it is that of another card, it was executed there."""
    rows = {row["target"]: row for row in RECORD["kernels"] if (row["kernel"], row["case"]) == COPY}
    with process() as pool:
        found = pool.submit(digest, target).result()
    assert found == rows[target]["ptx"] or jax.__version__ != RECORD["machine"]["jax"]
    like = rows[rows[target].get("same_as", target)]
    assert like["ptx"] == rows[target]["ptx"] and like["instructions"] > 0


# formats that Hopper's kernels do not support
ON_HOPPER: Cases = {
    kernel: {name: partial(check, target="h200") for name, check in cases.items() if "NVFP4" in name}
    for kernel, cases in AMPERE.items()
}


@pytest.mark.parametrize(("check", "schedules", "covered"), parameters(*AMPERE, few=ON_HOPPER, more={}))
def test_the_reference_is_met_on_hopper(check: Check, schedules: Any, covered: float) -> None:
    with process() as pool:
        assert pool.submit(least_covered, check, schedules, "h200").result() >= covered
