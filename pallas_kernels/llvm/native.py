"""Compiles LLVM's intermediate representation in milliseconds, for any processor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import llvmlite.binding as llvm

from pallas_kernels.llvm.max_isa import hidden

PACKAGE = Path(__file__).parents[1]
# Hash of the sources of all kernels for CPUs.
SOURCE = hashlib.sha256(
    b"".join(
        file.read_bytes()
        for pattern in ("llvm/*.*", "*/cpu/*.*", "*/cpu.py")
        for file in sorted(PACKAGE.glob(pattern))
    )
).hexdigest()
LEVEL = 2  # optimization level: kernels already have the intended loops
_objects: Objects | None = None


@dataclass(frozen=True)
class Target:
    """A compilation target.

    Attributes:
        triple: architecture, vendor, system.
        cpu: LLVM's name of the processor. It determines instruction scheduling and, with `features`, the
            available instructions.
        features: LLVM's names, such as "+avx2,-avx512f".
    """

    triple: str
    cpu: str = ""
    features: str = ""

    @property
    def architecture(self) -> str:
        """x86, aarch64 or another."""
        first = self.triple.split("-")[0]
        return {"x86_64": "x86", "arm64": "aarch64"}.get(first, first)

    def machine(self, *, jit: bool = False) -> Any:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        target = llvm.Target.from_triple(self.triple)
        return target.create_target_machine(cpu=self.cpu, features=self.features, opt=LEVEL, jit=jit)


def host() -> Target:
    """The local processor, without the instructions that `max_isa` hides."""
    return _host_without(frozenset(hidden(llvm.get_host_cpu_features())))


@cache
def _host_without(names: frozenset[str]) -> Target:
    features = llvm.FeatureMap({**llvm.get_host_cpu_features(), **dict.fromkeys(names, False)})
    return Target(llvm.get_process_triple(), llvm.get_host_cpu_name(), features.flatten())


def assembly(text: str, target: Target) -> str:
    """The assembly code of a module for a target that need not be the local one."""
    machine = target.machine()
    return str(machine.emit_assembly(_optimized(text, machine)))


class Objects(Protocol):
    """Keeps the code of kernels for later processes with the same sources. Names include the processor."""

    def load(self, name: str) -> bytes | None: ...

    def save(self, name: str, code: bytes) -> None: ...


def keep_objects(objects: Objects | None) -> None:
    """Uses these for all kernels with a name; None: each process compiles its own."""
    global _objects
    _objects = objects


def compiled(text: Callable[[], str], *functions: str, name: str = "") -> list[int]:
    """Addresses of a module's functions, and of its variables. They are never freed, since other threads may
    run them until the process ends.

    Args:
        text: makes the module's source. It is not called if the code was kept.
        name: identifies the kernel among all; empty: its code is not kept.
    """
    target = host()
    machine, objects = target.machine(jit=True), _objects if name else None
    key = f"{name}-{hashlib.sha256(repr(target).encode()).hexdigest()[:16]}"
    code = objects.load(key) if objects else None
    if code is None:
        code = machine.emit_object(_optimized(text(), machine))
        if objects:
            objects.save(key, code)
    engine = llvm.create_mcjit_compiler(_parsed("", machine), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    addresses = [engine.get_function_address(function) for function in functions]
    engine.detach()
    return addresses


def _optimized(text: str, machine: Any) -> Any:
    module = _parsed(text, machine)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(LEVEL))
    builder.getModulePassManager().run(module, builder)
    return module


def _parsed(text: str, machine: Any) -> Any:
    """A module in a separate context, so that several threads may compile at once."""
    context = llvm.create_context()
    module = llvm.parse_assembly(text, context)
    context.detach()
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    return module
