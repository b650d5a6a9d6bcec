"""Runs a JAX function whose Mosaic GPU kernels are compiled for a GPU and executed here.

XLA compiles the function twice: for the GPU, which gives the kernels' PTX, and for the CPU, where each
kernel is a call of the machine. Kernels must be made by `plgpu.kernel` while the function is traced.
Arguments that are references (of `jax.new_ref`) are updated in place, as on a GPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from tools.ptx_machine.capture import Compiled, kernels_of
from tools.ptx_machine.launch import Launch, addresses
from tools.ptx_machine.machine import Result, execute
from tools.ptx_machine.memory import Array
from tools.ptx_machine.mosaic import launch_of
from tools.ptx_machine.schedules import Schedule
from tools.ptx_machine.syntax import parse
from tools.ptx_machine.translate import Program, translate

Lower = Callable[..., jax.stages.Lowered]
_serial = itertools.count()  # Mosaic compiles each name once in a process


@dataclass(frozen=True)
class Run:
    """An execution of a kernel.

    Attributes:
        kernel: its name.
        program: what was executed.
        launch: of the kernel.
        result: of the machine.
        seconds: of the machine.
    """

    kernel: str
    program: Program
    launch: Launch
    result: Result
    seconds: float


class Emulation:
    """A function, compiled. A call runs it.

    Attributes:
        kernels: as they ship, in the order of their calls; their names end with a number.
        programs: the same, translated.
        runs: of the last call, in its order.
        schedule: of kernels in the next call.
    """

    def __init__(self, lower: Lower, function: Callable[..., Any], *args: Any) -> None:
        """Compiles the function.

        Args:
            lower: called with the function and its arguments: as jax.jit(function).lower(*args), for a GPU.
            args: trees of arrays, of the shapes of every call.

        Raises:
            RuntimeError: kernels were not compiled, or others are called on the CPU.
            Unsupported: the machine does not know an instruction of a kernel.
        """
        _machine()  # a thread inherits the mode of the one that starts it
        self.schedule = Schedule()
        self.runs: list[Run] = []
        names = list[str]()

        def once(*args: Any) -> Any:  # JAX has not traced this function yet
            return function(*args)

        with _replaced(partial(_numbered, names)):
            found = {kernel.name: kernel for kernel in kernels_of(lower(once, *args))}
        if different := sorted({*names} ^ {*found}):
            raise RuntimeError(f"{different}: plgpu.kernel must be called while the function is traced")
        self.kernels: list[Compiled] = [found[name] for name in names]
        self.programs: list[Program] = [translate(parse(kernel.ptx)) for kernel in self.kernels]
        with _replaced(self._called):
            calls = self._calls = itertools.count()
            self._compiled = jax.jit(lambda *args: function(*args)).lower(*args).compile()
        if next(calls) != len(names):
            raise RuntimeError(f"{len(names)} kernels for the GPU, but another number for the CPU")

    def __call__(self, *args: Any, schedule: Schedule | None = None) -> Any:
        """The function's result."""
        self.schedule, self.runs = schedule or Schedule(), []
        return jax.block_until_ready(self._compiled(*args))

    def replace(self, number: int, kernel: Compiled) -> None:
        """Executes another kernel in place of one, such as one with a fault, from now on."""
        self.kernels[number], self.programs[number] = kernel, translate(parse(kernel.ptx))

    def _called(
        self, body: Any = None, *, out_type: Any = (), kernel_name: str = "", **_: Any
    ) -> Callable[..., Any]:
        """Stands for `plgpu.kernel` when the function is traced for the CPU."""
        if body is None:
            return partial(self._called, out_type=out_type, kernel_name=kernel_name)

        def call(*args: Any) -> Any:
            number = next(self._calls)
            leaves, outs = jax.tree.leaves(args), jax.tree.leaves(out_type)
            refs = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Ref)]
            given = [leaf[...] if i in refs else leaf for i, leaf in enumerate(leaves)]
            results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*(given[i] for i in refs), *outs)]

            def run(*arrays: Any) -> list[np.ndarray]:
                return self._execute(number, kernel_name, [np.asarray(x) for x in arrays], refs, results)

            updated = jax.pure_callback(run, results, *given)
            for i, array in zip(refs, updated, strict=False):
                leaves[i][...] = array
            return jax.tree.unflatten(jax.tree.structure(out_type), updated[len(refs) :])

        return call

    def _execute(
        self, number: int, name: str, inputs: list[np.ndarray], refs: list[int], results: list[Any]
    ) -> list[np.ndarray]:
        outs = [np.zeros(x.shape, x.dtype) for x in results[len(refs) :]]
        arrays = [Array(f"input {i}", x, written=True) for i, x in enumerate(inputs)]
        arrays += [Array(f"output {i}", x, written=False) for i, x in enumerate(outs)]
        launch = launch_of(self.kernels[number].host, addresses(len(arrays)))
        begin = time.perf_counter()
        # XLA's threads take subnormal numbers as zeros, those of this executor do not
        result = _machine().submit(execute, self.programs[number], launch, arrays, self.schedule).result()
        self.runs.append(Run(name, self.programs[number], launch, result, time.perf_counter() - begin))
        wrong = {f"input {i}" for i in range(len(inputs)) if i not in refs} & {*result.written}
        if wrong:
            raise RuntimeError(f"{name} writes {sorted(wrong)}, which are no references")
        names = [*(f"input {i}" for i in refs), *(f"output {i}" for i in range(len(outs)))]
        return [result.arrays[name] for name in names]


@cache
def _machine() -> ThreadPoolExecutor:
    """A thread that executes kernels, started by the first call."""
    executor = ThreadPoolExecutor(1, "ptx_machine")
    executor.submit(int).result()
    return executor


def _numbered(names: list[str], body: Any = None, *, kernel_name: str = "", **how: Any) -> Callable[..., Any]:
    """Stands for `plgpu.kernel`: the kernel, with a name that no other has in this process."""
    if body is None:
        return partial(_numbered, names, kernel_name=kernel_name, **how)

    def call(*args: Any) -> Any:
        names.append(f"{kernel_name or 'kernel'}_{next(_serial)}")
        return _KERNEL(body, kernel_name=names[-1], **how)(*args)

    return call


_KERNEL = plgpu.kernel


@contextmanager
def _replaced(kernel: Callable[..., Any]) -> Iterator[None]:
    with mock.patch.object(plgpu, "kernel", kernel):
        yield
