"""Generations of devices, and the choice among the implementations of an operation by device and call.

An operation has a table: its kernels in order of preference, the newest generation first. Each has a check
that returns why it does not support a call. XLA serves what no kernel supports. `device` is the device to run
on, or a device of a topology to compile for; None: the first of the default backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args

import jax

from pallas_kernels import devices

Impl = Literal["auto", "mosaic", "llvm", "xla"]
DTYPES = ("bfloat16", "float16")
CORES = 132  # multiprocessors of an H100 or H200, for devices that do not report it
BLOCKS = 2  # desired thread blocks per multiprocessor
XLA = "XLA"  # in place of a target's name
NO_GRADIENT = "the kernel has no gradient; pass impl='xla', for attention with pages, or use stop_gradient"
REFUSED = {  # by the class of an argument
    "BatchTracer": "jax.vmap cannot batch the kernel; pass impl='xla'",
    "JVPTracer": NO_GRADIENT,
    "LinearizeTracer": NO_GRADIENT,
}


@dataclass(frozen=True)
class Target:
    """The devices that run a generation of kernels.

    Attributes:
        name: the generation.
        impl: the name by which calls request its kernels.
        devices: the devices, in words.
        includes: whether a device is one of them.
    """

    name: str
    impl: Impl
    devices: str
    includes: Callable[[jax.Device], bool]


@dataclass(frozen=True)
class Implementation:
    """A kernel of an operation.

    Attributes:
        target: the devices that it runs on.
        why_not: takes arrays (or any objects with shapes and dtypes) and options of a call on such a device,
            and returns why the kernel does not support them, or None.
        run: computes the operation, see `lazy`.
    """

    target: Target
    why_not: Callable[..., str | None]
    run: Callable[..., Any]

    def why_unsupported(self, device: jax.Device, *call: Any) -> str | None:
        """Why it does not support a call on the device, or None."""
        if not self.target.includes(device):
            return f"device={device.device_kind}: the kernel is for {self.target.devices}"
        # older ones infer no layouts for tensor memory
        if self.target is BLACKWELL and jax.__version_info__ < (0, 12):
            return f"jax={jax.__version__}: the kernel needs jax 0.12"
        refused = devices.cpu_refused() if self.target is CPU else devices.kernels_refused()
        return refused or self.why_not(*call)

    def call(self, function: str, *args: Any, **options: Any) -> Any:
        """`run` for the public function of this name, which is in the errors of jax.vmap and jax.grad."""
        for tracer in {type(leaf).__name__ for leaf in jax.tree.leaves((args, options))} & REFUSED.keys():
            raise NotImplementedError(f"{function}: {REFUSED[tracer]}")
        return self.run(*args, **options)


def lazy(module: str, name: str, *unused: str) -> Callable[..., Any]:
    """A function that is imported by its first call, since importing Mosaic takes a third of a second.

    Args:
        unused: options of the operation that the function does not take.
    """

    def run(*args: Any, **options: Any) -> Any:
        taken = {option: value for option, value in options.items() if option not in unused}
        return getattr(import_module(f"pallas_kernels.{module}"), name)(*args, **taken)

    return run


Table = Sequence[Implementation]


class Choice(NamedTuple):
    """The implementation that serves an operation.

    Attributes:
        name: of its target, or XLA.
        why: why not the newest kernel for devices of this kind, or None.
    """

    name: str
    why: str | None


def capability(device: jax.Device | None) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None: another device."""
    version = getattr(device or jax.devices()[0], "compute_capability", None)
    major, dot, minor = str(version).partition(".")
    return (int(major), int(minor)) if dot and major.isdecimal() and minor.isdecimal() else None


def on_cpu(device: jax.Device | None) -> bool:
    return getattr(device or jax.devices()[0], "platform", None) == "cpu"


def cores(device: jax.Device | None) -> int:
    """Number of multiprocessors of the device."""
    return getattr(device, "core_count", None) or CORES


def has_tma(device: jax.Device) -> bool:
    """Whether Pallas copies to shared memory with TMA on this GPU, rather than with cp.async."""
    return (capability(device) or (0, 0)) >= (9, 0)


def _runs_mma(device: jax.Device) -> bool:
    version = capability(device)
    return version is not None and version >= (8, 0) and version[0] != 9


# wgmma exists on 9.0 alone. mma.sync exists everywhere from 8.0 on. Hopper has kernels that are faster than
# those for mma.sync, and leaves to XLA most of what they do not support.
HOPPER = Target(
    "Hopper", "mosaic", "GPUs of compute capability 9.0", lambda device: capability(device) == (9, 0)
)
AMPERE = Target("Ampere", "mosaic", "GPUs of compute capability 8.x, and 10.0 and newer", _runs_mma)
# the same kernels for formats that Hopper's do not support
AMPERE_OR_NEWER = Target(
    "Ampere",
    "mosaic",
    "GPUs of compute capability 8.0 and newer",
    lambda device: (capability(device) or (0, 0)) >= (8, 0),
)
# tcgen05, of 10.0; its kernels were not executed for 10.3
BLACKWELL = Target(
    "Blackwell", "mosaic", "GPUs of compute capability 10.0", lambda device: capability(device) == (10, 0)
)
CPU = Target("CPU", "llvm", "CPUs", on_cpu)


def why_no_dtype(x: Any) -> str | None:
    """Why kernels for GPUs do not take queries, or rows of a product, of x's dtype, or None."""
    return None if str(x.dtype) in DTYPES else f"dtype={x.dtype}: the kernel takes {' and '.join(DTYPES)}"


def choose(table: Table, impl: Impl, device: jax.Device | None, *call: Any) -> Implementation | None:
    """The first implementation that supports the call; None: XLA's.

    Raises:
        ValueError: impl is unknown, or names kernels of which none supports the call.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl={impl!r}: one of {', '.join(map(repr, get_args(Impl)))}")
    if impl == "xla":
        return None
    device = device or jax.devices()[0]
    allowed = [kernel for kernel in table if impl in ("auto", kernel.target.impl)]
    for kernel in allowed:
        if kernel.why_unsupported(device, *call) is None:
            return kernel
    if impl != "auto":
        why = why_none(allowed, device, *call) if allowed else "the operation has no such kernel"
        raise ValueError(f"impl={impl!r}: {why}")
    return None


def why_none(table: Table, device: jax.Device | None, *call: Any) -> str | None:
    """Why no implementation supports the call, or None if one does."""
    device = device or jax.devices()[0]
    kernels = [kernel for kernel in table if kernel.target.includes(device)]
    if not kernels:
        targets = "; ".join(kernel.target.devices for kernel in table)
        return f"device={device.device_kind}: the kernel is for {targets}"
    reasons = [kernel.why_unsupported(device, *call) for kernel in kernels]
    return None if None in reasons else "; ".join(dict.fromkeys(filter(None, reasons)))


def explain(table: Table, device: jax.Device | None, *call: Any) -> Choice:
    """Which implementation serves the call, and why not the newest one for devices of this kind. Where XLA
    serves, all reasons count.
    """
    device = device or jax.devices()[0]
    table = [kernel for kernel in table if (kernel.target is CPU) == on_cpu(device)]
    table = [kernel for kernel in table if kernel.target is not BLACKWELL or BLACKWELL.includes(device)]
    why = None
    for kernel in table:
        refused = kernel.why_unsupported(device, *call)
        if refused is None:
            return Choice(kernel.target.name, why)
        why = why or refused
    return Choice(XLA, why_none(table, device, *call) if table else None)
