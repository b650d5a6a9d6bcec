"""Local devices are found without log noise, and without hiding problems in a GPU's installation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import devices
from tests.extras import of_extra

CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def test_the_plugin_without_a_gpu_says_nothing() -> None:
    of_extra("aot", "jax_plugins.xla_cuda13")
    if any(map(os.path.exists, devices.DRIVER_NODES)):
        pytest.skip("there is a GPU's driver")
    code = "from pallas_kernels.devices import visible_devices; print(visible_devices()[0].platform)"
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", CHECK)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert (done.stdout, done.stderr) == ("cpu\n", "")


def test_with_a_driver_jax_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECK, raising=False)
    monkeypatch.setattr(devices, "DRIVER_NODES", (str(tmp_path),))
    devices.skip_cuda_check()
    assert CHECK not in os.environ
    monkeypatch.setattr(devices, "DRIVER_NODES", ())
    devices.skip_cuda_check()
    assert os.environ[CHECK] == "1"
