"""Runs many_devices.py and weights_on_devices.py on eight devices of a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.many_devices import QUICK, REST

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}


FAMILIES = [*QUICK, *REST]
OTHERS = "others"  # tests of no family


def run(marker: str, timeout: int, only: str = "") -> None:
    """Runs the tests with this marker. only: for -k."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        marker,
        "-k",
        only,
        f"--timeout={timeout}",
        "tests/parallel/many_devices.py",
        "tests/parallel/adapters_on_devices.py",
        "tests/parallel/experts_on_devices.py",
        "tests/parallel/ranks_on_devices.py",
        "tests/parallel/ranks_in_stages_on_devices.py",
        "tests/parallel/weights_on_devices.py",
        "tests/parallel/stages_on_devices.py",
    ]
    result = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-20000:] + result.stderr[-2000:]


def of_family(variant: str) -> str:
    """For -k: the tests whose first parameter this is."""
    return f"[{variant}- or [{variant}]"


@pytest.mark.timeout(900)
def test_on_eight_devices() -> None:
    run("not full", 500)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", [*FAMILIES, OTHERS])
def test_every_family_on_eight_devices(variant: str) -> None:
    others = f"not ({' or '.join(map(of_family, FAMILIES))})"
    run("full", 1500, others if variant == OTHERS else of_family(variant))
