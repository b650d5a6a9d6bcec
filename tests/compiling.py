"""XLA's options for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from jengine.execution import programs
from jengine.execution.programs import CompilerOptions

QUICK: CompilerOptions = {"xla_backend_optimization_level": "0"}  # compiles in 60 % of the time; not for comparisons of bits
QUICK_PROCESS = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # the same for a process: variables of its environment


@contextmanager
def quickly() -> Iterator[None]:
    """Engines that start in this context compile their programs with few optimizations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "compile_all", partial(programs.compile_all, options=QUICK))
        yield
