"""Lists local devices, without log noise if CUDA's plugin is installed but there is no GPU."""

from __future__ import annotations

import os

import jax

DRIVER_NODES = "/dev/nvidiactl", "/dev/dxg"  # of NVIDIA's driver; the second one is for WSL


def visible_devices() -> list[jax.Device]:
    """`jax.devices()`, after `skip_cuda_check`."""
    skip_cuda_check()
    return jax.devices()


def skip_cuda_check() -> None:
    """Without NVIDIA's driver, prevents JAX from checking CUDA's libraries at its start.

    The extra `aot` installs CUDA's plugin without cuDNN, and the check would log a traceback. With a driver,
    JAX does check, and reports missing libraries.
    """
    if not any(os.path.exists(node) for node in DRIVER_NODES):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
