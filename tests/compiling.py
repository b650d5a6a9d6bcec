"""XLA's options for tests."""

from __future__ import annotations

import functools

import pytest

from jengine.execution import programs
from jengine.execution.programs import CompilerOptions

QUICK: CompilerOptions = {"xla_backend_optimization_level": "0"}  # compiles in 60 % of the time; not for comparisons of bits


def compile_quickly(patch: pytest.MonkeyPatch) -> None:
    """Whole engines compile with these. They need a cache folder of their own: what they save looks like any program."""
    patch.setattr(programs, "compile_all", functools.partial(programs.compile_all, options=QUICK))
