"""Runs tests on eight devices of a CPU, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.parallel.many_devices import QUICK, REST

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}


FAMILIES = [*QUICK, *REST]
NAMES = "many", "adapters_on", "experts_on", "ranks_on", "ranks_in_stages_on", "weights_on", "stages_on"
FILES = [f"tests/parallel/{name}_devices.py" for name in NAMES]
NO_TESTS = 5  # pytest's exit status


def run(
    marker: str, timeout: int, files: Sequence[str], only: str = "", *, statuses: Sequence[int] = (0,)
) -> None:
    """Runs the tests of these files with this marker. only: for -k."""
    options = ["-q", "-p", "no:cacheprovider", "-m", marker, "-k", only, f"--timeout={timeout}"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    result = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode in statuses, result.stdout[-20000:] + result.stderr[-2000:]


def of_family(variant: str) -> str:
    """For -k: the tests whose first parameter this is."""
    return f"[{variant}- or [{variant}]"


@pytest.mark.timeout(900)
def test_on_eight_devices() -> None:
    run("not full", 500, FILES)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", FAMILIES)
def test_every_family_on_eight_devices(variant: str) -> None:
    run("full", 1500, FILES, of_family(variant))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", FILES)
def test_the_rest_on_eight_devices(file: str) -> None:
    families = " or ".join(map(of_family, FAMILIES))
    run("full", 1500, [file], f"not ({families})", statuses=(0, NO_TESTS))
