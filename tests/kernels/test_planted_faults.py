"""Faults planted in the PTX of kernels are noticed."""

from __future__ import annotations

import functools

import pytest

from tests.extras import compiler_for_gpus
from tests.kernels.faults import FAULTS, ON_AMPERE, ON_BLACKWELL, Fault, Report, Victim, reports_elsewhere

compiler_for_gpus()


ELSEWHERE = dict.fromkeys(ON_AMPERE, "a100") | dict.fromkeys(ON_BLACKWELL, "b200")


@functools.cache
def victim(name: str) -> Victim:
    return Victim(name)


def check(fault: Fault, report: Report | None) -> None:
    assert report is not None, "nothing tells of it"
    assert fault.told in report.told
    for finding in report.findings:
        assert finding.line or finding.kind == "fault"  # a deadlock is in many lines, which its message has
        assert ".py:" in str(finding)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name) for fault in FAULTS if fault.kernel not in ELSEWHERE]
)
def test_a_fault_is_noticed(fault: Fault) -> None:
    check(fault, victim(fault.kernel).report(fault))


@pytest.mark.parametrize("kernel", ELSEWHERE)
def test_faults_are_noticed_in_the_kernels_for_ampere_and_blackwell(kernel: str) -> None:
    faults = [fault for fault in FAULTS if fault.kernel == kernel]
    for fault, report in zip(faults, reports_elsewhere(kernel, faults, ELSEWHERE[kernel]), strict=True):
        check(fault, report)
