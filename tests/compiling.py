"""XLA's options for tests, and what it compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from jengine.execution.programs import CompilerOptions
from tests.execution.thunks import Thunk, dumped, dumping

# compiles in 60 % of the time; not for comparisons of bits
QUICK: CompilerOptions = {"xla_backend_optimization_level": "0"}
# the same for a process: variables of its environment
QUICK_PROCESS = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


@contextmanager
def quickly_compiled(quickly: bool = True) -> Iterator[None]:
    """XLA compiles with few optimizations here, or with all: the same operations, fusions and buffers, but
    slower code.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quickly)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def compiled_with_thunks(
    lowered: jax.stages.Lowered, options: CompilerOptions | None = None
) -> tuple[jax.stages.Compiled, tuple[Thunk, ...]]:
    """Compiles a program that is lowered for a GPU. Returns it and its launches."""
    with TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={**(options or {}), **dumping(Path(folder))})
        [thunks] = dumped(Path(folder)).values()
        return compiled, thunks
