"""Kernels executed as they ship: their PTX, for a GPU that is not there, in the machine for PTX.

What `interpreted` checks is another form of some kernels: one with operands in shared memory. Here the same
checks run what a GPU gets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from pallas_kernels.compilation.ahead_of_time import device, lower_for
from tests.kernels.interpreted import Runner
from tools.ptx_machine.capture import Compiled
from tools.ptx_machine.emulate import Emulation, Run
from tools.ptx_machine.findings import Finding
from tools.ptx_machine.schedules import Schedule

# Different orders of threads and asynchronous effects, and different garbage where nothing was written.
FEW = (
    Schedule(seed=0, order="random", garbage="nan"),
    Schedule(seed=1, order="late", garbage="random"),
    Schedule(seed=2, order="slow_consumer", garbage="zero"),
)
MANY = (
    *FEW,
    Schedule(seed=3, order="early", garbage="nan"),
    Schedule(seed=4, order="priority", garbage="random"),
    Schedule(seed=5, order="slow_producer", garbage="nan"),
    Schedule(seed=6, order="straggler", garbage="random"),
    Schedule(seed=7, order="random", garbage="random", resident=1),
)


NAMES = re.compile(r"^\s*\.(version|target|file|loc)\s.*\n", re.MULTILINE)  # of the GPU and of sources


def anonymous(kernels: Sequence[Compiled]) -> str:
    """Their PTX, without what names them, the GPU and their source."""
    return "\n".join(NAMES.sub("", kernel.ptx.replace(kernel.name, "")) for kernel in kernels)


class _Stop(Exception):
    """Ends a check whose kernels are compiled."""

    def __init__(self, kernels: list[Compiled]) -> None:
        super().__init__()
        self.kernels = kernels


class Executed:
    """Runs functions under several schedules, in which they must give the same bits, and find nothing wrong.

    Attributes:
        runs: all executions.
        calls: what was called: the function, its arguments and its result.
    """

    def __init__(self, schedules: tuple[Schedule, ...] = FEW, target: str = "h200") -> None:
        self.schedules = schedules
        self.runs: list[Run] = []
        self.calls: list[tuple[Emulation, list[Any], Any]] = []
        self._lower = partial(lower_for, device(target))
        self._compiled: dict[Any, tuple[Any, Emulation]] = {}  # also functions: they keep their identity

    @property
    def runner(self) -> Runner:
        return Runner(self._run, None)

    def covered(self) -> list[tuple[str, int, int]]:
        """Of each kernel: its name, lines of its PTX that were executed, and lines of its PTX."""
        names = {id(run.program): run.kernel for run in self.runs}
        lines = {id(run.program): {one.line for one in run.program.kernel.body} for run in self.runs}
        executed = dict[int, set[int]]()
        for run in self.runs:
            executed.setdefault(id(run.program), set()).update(run.result.covered)
        return [(names[i], len(executed[i]), len(lines[i])) for i in names]

    def least_covered(self) -> float:
        """The smallest part of a kernel that was executed."""
        return min(executed / lines for _, executed, lines in self.covered())

    def compiled(self, check: Callable[..., float]) -> list[Compiled]:
        """The kernels that a check runs first. They are not executed."""

        def run(function: Callable[..., Any], *args: Any, **how: Any) -> Any:
            raise _Stop(self._emulation(function, *args, **how)[0].kernels)

        try:
            check(runner=Runner(run, None))
        except _Stop as stop:
            return stop.kernels
        raise RuntimeError("the check has run no kernel")

    def _emulation(self, function: Callable[..., Any], *args: Any, **how: Any) -> tuple[Emulation, list[Any]]:
        """A function, compiled, and its arrays."""
        leaves, tree = jax.tree.flatten((args, how))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
        arrays = [leaves[i] for i in places]

        def plain(*given: Any) -> Any:
            every = dict(enumerate(leaves)) | dict(zip(places, given, strict=True))
            args, how = jax.tree.unflatten(tree, [*every.values()])
            return function(*args, **how)

        key = id(function), tree, *(i for i, leaf in enumerate(leaves) if i not in places)
        if key not in self._compiled:
            self._compiled[key] = function, Emulation(self._lower, plain, *arrays)
        return self._compiled[key][1], arrays

    def _run(self, function: Callable[..., Any], *args: Any, **how: Any) -> Any:
        emulation, arrays = self._emulation(function, *args, **how)
        results = []
        for schedule in self.schedules:
            results.append(emulation(*arrays, schedule=schedule))
            self.runs += emulation.runs
            for run in emulation.runs:
                wrong = [str(finding) for finding in run.result.findings if is_wrong(finding)]
                assert not wrong, f"{run.kernel}, {schedule}: {wrong}"
        first, *others = (jax.tree.map(as_bytes, result) for result in results)
        for other, schedule in zip(others, self.schedules[1:], strict=True):
            same = jax.tree.map(np.array_equal, first, other)
            assert all(jax.tree.leaves(same)), f"{schedule} gives other bits than {self.schedules[0]}: {same}"
        self.calls.append((emulation, arrays, results[0]))
        return results[0]


def is_wrong(finding: Finding) -> bool:
    """Reads of what nothing has written are not: schedules have other garbage there, but the same results."""
    return finding.error and not finding.kind.startswith("uninitialised")


def as_bytes(array: jax.Array) -> np.ndarray[Any, Any]:
    return np.frombuffer(np.asarray(array).tobytes(), np.uint8)
