"""The PTX of the kernels for Ampere, as they ship to Ampere and, with copies by TMA, to Blackwell, and of
those for Blackwell, executed.

In processes of their own, since one compiles for one compute capability.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import jax
import pytest

from benchmarks.machine import RESULTS
from tests.extras import compiler_for_gpus
from tests.kernels.executed import FEW, Executed
from tests.kernels.shipped import (
    AMPERE,
    BLACKWELL,
    CASES,
    MORE_AMPERE,
    MORE_BLACKWELL,
    Cases,
    Check,
    parameters,
)

compiler_for_gpus()

RECORD = json.loads((RESULTS / "executed_kernels.json").read_text())
COPY = "copy_pages", "int8"
AMPERE_CASES, HOPPER_CASES = (AMPERE, MORE_AMPERE), (CASES,)


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


def compiled(target: str, cases: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Of each kernel and case, the digest of the PTX, and what prepares the launches."""
    from benchmarks.executed_kernels import TARGETS, digest  # which configures JAX

    every = [Executed(FEW, target).compiled(TARGETS[target][0][kernel][name]) for kernel, name in cases]
    return [(digest(kernels), [one.host.replace(one.name, "") for one in kernels]) for kernels in every]


def check_record(target: str, cases: Sequence[tuple[str, str]]) -> None:
    """The PTX is that of the record. Where it is that of another card, it was executed there, and blocks,
    threads and shared memory are equal, too.
    """
    rows = {(row["target"], row["kernel"], row["case"]): row for row in RECORD["kernels"]}
    like = {case: rows[target, *case].get("same_as", target) for case in cases}
    launches = dict[tuple[str, str, str], list[str]]()
    for card in {target, *like.values()}:
        some = [case for case in cases if card in (target, like[case])]
        with process() as pool:
            found = pool.submit(compiled, card, some).result()
        for case, (digest, hosts) in zip(some, found, strict=True):
            row, launches[card, *case] = rows[card, *case], hosts
            assert digest == row["ptx"] or jax.__version__ != RECORD["machine"]["jax"], (card, case)
    for case, card in like.items():
        assert rows[card, *case]["ptx"] == rows[target, *case]["ptx"], case
        assert rows[card, *case]["instructions"] > 0, case
        assert launches[card, *case] == launches[target, *case], case


def test_a_card_has_the_ptx_of_the_record() -> None:
    check_record("l4", [COPY])


@pytest.mark.full
@pytest.mark.parametrize("target", ["a100", "rtx3090", "l4", "h200", "b200", "rtx5090"])
def test_cards_have_the_ptx_of_the_record(target: str) -> None:
    rows = [row for row in RECORD["kernels"] if row["target"] == target]
    check_record(target, [(row["kernel"], row["case"]) for row in rows])


def test_every_case_was_executed_for_ampere_ada_and_hopper() -> None:
    """For Ampere and Ada also those of long tests."""
    rows = {(row["target"], row["kernel"], row["case"]) for row in RECORD["kernels"]}
    wanted = {"a100": AMPERE_CASES, "rtx3090": AMPERE_CASES, "l4": AMPERE_CASES, "h200": HOPPER_CASES}
    cases = {
        (target, kernel, name)
        for target, every in wanted.items()
        for of in every
        for kernel, names in of.items()
        for name in names
    }
    assert cases - rows == set()


# formats that Hopper's kernels do not support
ON_HOPPER: Cases = {
    kernel: {name: partial(check, target="h200") for name, check in cases.items() if "NVFP4" in name}
    for kernel, cases in AMPERE.items()
}


@pytest.mark.parametrize(("check", "schedules", "covered"), parameters(*AMPERE, few=ON_HOPPER, more={}))
def test_the_reference_is_met_on_hopper(check: Check, schedules: Any, covered: float) -> None:
    with process() as pool:
        assert pool.submit(least_covered, check, schedules, "h200").result() >= covered
