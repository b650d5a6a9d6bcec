"""The devices that kernels are for.

`device` is the device to run on, or one of a topology to compile for; None: the first of the default backend.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax

from pallas_kernels.devices import kernels_refused

Impl = Literal["auto", "mosaic", "llvm", "xla"]
HOPPER, AMPERE = ("9.0",), ("8.0", "8.6", "8.9")  # compute capabilities; Ada counts as Ampere
DTYPES = ("bfloat16", "float16")
CORES = 132  # multiprocessors of an H100 or H200, for devices that do not report it
BLOCKS = 2  # desired thread blocks per multiprocessor


def on_cpu(device: jax.Device | None) -> bool:
    return getattr(device or jax.devices()[0], "platform", None) == "cpu"


def capability(device: jax.Device | None) -> str | None:
    return getattr(device or jax.devices()[0], "compute_capability", None)


def cores(device: jax.Device | None) -> int:
    """Number of multiprocessors of the device."""
    return getattr(device, "core_count", None) or CORES


def kernel_serves(impl: Impl, refused: str | None, device: jax.Device | None) -> bool:
    """Whether to use the device's kernel. `refused` is the reason why it does not support the arrays, or
    None.

    Raises:
        ValueError: impl is unknown, or names a kernel that cannot be used here.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl={impl!r}: one of {', '.join(map(repr, get_args(Impl)))}")
    if impl not in ("auto", "xla"):
        if refused is None and (impl == "llvm") != on_cpu(device):
            refused = (
                f"device={(device or jax.devices()[0]).device_kind}: Mosaic's kernels are for GPUs, LLVM's"
                " for CPUs"
            )
        if refused is not None:
            raise ValueError(f"impl={impl!r}: {refused}")
    return impl != "xla" and refused is None and kernels_refused() is None
