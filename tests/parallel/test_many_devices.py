"""Runs many_devices.py on eight devices of a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}


def run(marker: str, timeout: int) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        marker,
        f"--timeout={timeout}",
        "tests/parallel/many_devices.py",
    ]
    result = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-20000:] + result.stderr[-2000:]


@pytest.mark.timeout(600)
def test_on_eight_devices() -> None:
    run("not full", 500)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_family_on_eight_devices() -> None:
    run("full", 3000)
