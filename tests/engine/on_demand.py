"""Engines whose programs are compiled when a step first needs them. Most tests need few of a table's
programs.

The table and the choice of programs are those of any engine. The start is another: nothing is compiled ahead,
warmed up or measured. So tests of the start and of costs have whole engines.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

import pallas_kernels
from jengine.base.compiles import announced
from jengine.base.progress import Progress
from jengine.engine.setup import program_set
from jengine.execution.cache_folders import cache_root
from jengine.execution.compile_children import CompileChildren
from jengine.execution.kinds import Key
from jengine.execution.program_cache import ProgramCache
from jengine.execution.program_folder import UntrustedProgram
from jengine.execution.program_store import PrebuiltPrograms, ProgramStore, packed
from jengine.execution.programs import (
    CompilerOptions,
    Programs,
    callable_of,
    lower,
    memory_of,
    program_keys,
)
from jengine.execution.spec import ExecutionSpec
from jengine.scheduling.costs.step_costs import StepCosts, SwapCosts
from jengine.table.program_table import ProgramTable
from tests.compiling import OPTIMIZED
from tests.engine.running import Estimates

NAME = "program"  # in its folder
CPU_KERNELS = "llvm/*.*", "*/cpu/*.*", "*/cpu.py"
IMPORTED = re.compile(r"^\s*from pallas_kernels\.([\w.]+) import", re.MULTILINE)
MOST_READY = 64  # a process has 65,530 memory maps, and a program needs hundreds


class OnDemand(Programs):
    """All of a table's programs, each compiled when it is first called. Equal programs are compiled once by
    all processes of a test run, whatever the options of their engines.
    """

    options: ClassVar[CompilerOptions] = {}
    # in this process, by fingerprint and number of pages
    ready: ClassVar[dict[tuple[str, int, Key], Any]] = {}

    def __init__(
        self,
        spec: ExecutionSpec,
        store: ProgramCache | PrebuiltPrograms | None,
        *,
        threads: int,
        progress: Progress,
        first: Sequence[Key] | None = None,
        children: CompileChildren | None = None,
    ) -> None:
        super().__init__(spec, None, threads=threads, progress=progress, first=[])
        self._names = spec.fingerprint(), spec.num_pages
        self._keys = {*program_keys(spec)}
        self.loaded = len(self._keys)  # so the start expects no others

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __getitem__(self, key: Key) -> Any:
        if key not in self._programs:
            assert key in self._keys, key
            name = (*self._names, key)
            program = self.ready[name] = self.ready.pop(name) if name in self.ready else self._obtained(key)
            if len(self.ready) > MOST_READY:
                del self.ready[next(iter(self.ready))]  # the least recently used one
            self._programs[key], self.memory[key] = callable_of(key, program), memory_of(program)
        return self._programs[key]

    def _obtained(self, key: Key) -> Any:
        """Loads the program, or compiles and saves it, in a folder for its text.

        Another file names this folder by the spec and the key, so that no process lowers the program only to
        find it.
        """
        name = hashlib.sha256(f"{self._names} {key} {self.options}".encode()).hexdigest()
        known = cache_root() / "known" / name[:24]
        with suppress(FileNotFoundError, UntrustedProgram):
            return self._loaded(known.read_text())
        digest, program = self._by_text(key)
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(digest)
        return program

    def _loaded(self, digest: str) -> Any:
        store = _store(digest)
        return store.load_one(NAME, store.manifest().programs, self._devices)

    def _by_text(self, key: Key) -> tuple[str, Any]:
        lowered = lower(self.spec, key)
        identity = {
            name: self._identity[name]
            for name in ("processor", "mesh", "devices", "jax", "jaxlib", "kernels")
        }
        text = (
            f"{identity} {self.options} {kernels_digest()} {lowered.args_info} {lowered.out_info}"
            f" {lowered.as_text()}"
        )
        digest = hashlib.sha256(text.encode()).hexdigest()[:24]
        with suppress(UntrustedProgram):  # there is none
            return digest, self._loaded(digest)
        with announced():
            program = lowered.compile(compiler_options=self.options)
        store = _store(digest)
        store.add(NAME, packed(program, "cpu"))
        store.finish(self._identity, {})
        return digest, program


@functools.cache
def kernels_digest() -> str:
    """A hash of the sources of a CPU's kernels. A program's text says everything else, but these only by
    name.
    """
    folder = Path(pallas_kernels.__file__).parent
    digest = hashlib.sha256()
    for file in kernel_sources(folder):
        digest.update(f"{file.relative_to(folder)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def kernel_sources(folder: Path) -> list[Path]:
    """The files of kernels for CPUs, and the other modules of pallas_kernels that they import."""
    kernels = {file for pattern in CPU_KERNELS for file in folder.glob(pattern)}
    imported = {name.replace(".", "/") for file in kernels for name in IMPORTED.findall(file.read_text())}
    return sorted(kernels | {file for name in imported if (file := folder / f"{name}.py").exists()})


def _store(digest: str) -> ProgramStore:
    return ProgramStore(cache_root() / "programs" / f"{digest}-0")


class Optimized(OnDemand):
    """The same, compiled with XLA's usual optimizations."""

    options: ClassVar[CompilerOptions] = OPTIMIZED
    ready: ClassVar[dict[tuple[str, int, Key], Any]] = {}


class GuessedCosts:
    """In the place of saved costs: guesses for every program, which are neither measured nor saved."""

    def __init__(self, root: Path, fingerprint: str) -> None:
        pass

    def load(self, table: ProgramTable) -> StepCosts:
        guess = Estimates(table)
        costs = Estimates(table, {key: guess.base(key) for key in table.trunks()})
        costs.swaps = SwapCosts()
        return costs

    def save(self, costs: StepCosts) -> None:
        pass

    update = save


@contextmanager
def on_demand(*, optimized: bool = False) -> Iterator[None]:
    """Engines that start in this context compile on demand, with XLA's usual optimizations if `optimized`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_set, "Programs", Optimized if optimized else OnDemand)
        patch.setattr(program_set, "CostsFile", GuessedCosts)
        yield
