"""Local devices, listed without log noise if CUDA's plugin is there but no GPU is, the default device, and
whether kernels may be used.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax

_DIFFERENTIABLE = ContextVar("differentiable", default=False)
_BATCH_INVARIANT = ContextVar("batch_invariant", default=False)
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


def traced_for() -> jax.Device:
    """The device for which programs are traced: the default device."""
    device: Any = jax.config.jax_default_device
    return device if hasattr(device, "platform") else jax.devices(device)[0]


def traced_for_cpu() -> bool:
    """Whether the default device is a CPU."""
    return bool(traced_for().platform == "cpu")


@contextmanager
def differentiable() -> Iterator[None]:
    """Functions that are traced within use XLA's forms: kernels have no derivatives."""
    before = _DIFFERENTIABLE.set(True)
    try:
        yield
    finally:
        _DIFFERENTIABLE.reset(before)


@contextmanager
def batch_invariant(wanted: bool = True) -> Iterator[None]:
    """If wanted, the bits of a row must depend neither on its place nor on other rows in functions that are
    traced within.
    """
    before = _BATCH_INVARIANT.set(wanted)
    try:
        yield
    finally:
        _BATCH_INVARIANT.reset(before)


def traced_batch_invariant() -> bool:
    """Whether a function is traced within `batch_invariant`."""
    return _BATCH_INVARIANT.get()


def kernels_refused() -> str | None:
    """Why kernels must not be used here, whatever the device, or None."""
    return "kernels have no derivatives" if _DIFFERENTIABLE.get() else None


def cpu_refused() -> str | None:
    """Why CPU kernels are unavailable, or None."""
    return kernels_refused() or _why_no_compiler()


@cache
def _why_no_compiler() -> str | None:
    return "llvmlite is not installed" if importlib.util.find_spec("llvmlite") is None else None
