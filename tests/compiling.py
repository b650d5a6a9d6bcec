"""XLA's options for tests."""

from __future__ import annotations

from jengine.execution.programs import CompilerOptions

QUICK: CompilerOptions = {"xla_backend_optimization_level": "0"}  # compiles in 60 % of the time; not for comparisons of bits
